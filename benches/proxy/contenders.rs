//! The proxies that are compared, before the same workers, each with a thread of work for each CPU that the bench may use.

use std::fmt::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub struct Contender {
    pub name: &'static str,
    pub address: SocketAddr,
    process: Option<Child>,
}

impl Drop for Contender {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // nginx has its work done by others, which it ends only if it is asked to.
            let asked = Command::new("kill").args(["-TERM", &process.id().to_string()]).status();
            if self.name != "nginx" || asked.is_err() {
                let _ = process.kill();
            }
            let _ = process.wait();
        }
    }
}

impl Contender {
    /// No proxy: the first worker itself.
    pub fn direct(worker: SocketAddr) -> Contender {
        Contender { name: "direct", address: worker, process: None }
    }

    /// One of [`known`] with a thread of work for each of these CPUs, and on those alone; `None` if it is not installed.
    pub fn on(name: &str, cpus: &[&str], workers: &[SocketAddr], directory: &Path) -> Option<Contender> {
        let (name, program, prepare) = known().into_iter().find(|known| known.0 == name)?;
        let place = directory.join(format!("{}-{}", name.replace(' ', "-"), cpus.len()));
        std::fs::create_dir_all(&place).unwrap();
        let mut command = Command::new("taskset");
        command.args(["-c", &cpus.join(","), &program]);
        Contender::start(name, command, prepare, cpus.len(), workers, &place)
    }

    /// `None` if its program is not installed.
    fn start(
        name: &'static str,
        mut program: Command,
        prepare: Prepare,
        threads: usize,
        workers: &[SocketAddr],
        place: &Path,
    ) -> Option<Contender> {
        let port = free_port();
        let (config, arguments) = prepare(port, threads, workers, place);
        std::fs::write(place.join("config"), config).unwrap();
        let output = std::fs::File::create(place.join("output")).unwrap();
        let started = program
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let contender = Contender { name, address, process: Some(started.ok()?) };
        wait_for(address, place);
        Some(contender)
    }

    /// Has it, or without a process this one, run on these CPUs from now on.
    pub fn run_on(&self, cpus: &str) {
        let pid = self.process.as_ref().map_or(std::process::id(), Child::id).to_string();
        // It fails, its work done, where a thread ends meanwhile.
        Command::new("taskset")
            .args(["-a", "-p", "-c", cpus, &pid])
            .output()
            .expect("taskset, of util-linux");
    }

    /// Seconds of CPU so far, of all threads and of the processes that it has started.
    pub fn cpu_seconds(&self) -> f64 {
        let Some(process) = &self.process else { return 0.0 };
        let pid = process.id();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let children = children.split_whitespace().map(str::to_owned);
        children.chain([pid.to_string()]).map(|pid| seconds_of(&pid)).sum()
    }

    /// Resident memory in MiB.
    pub fn resident_mib(&self) -> f64 {
        let Some(process) = &self.process else { return 0.0 };
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().split(' ').next()?.parse().ok());
        kib.unwrap_or(0.0) / 1024.0
    }
}

fn seconds_of(pid: &str) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// The config for a proxy at that port with so many threads of work before these workers, with its files in that directory; and its
/// arguments.
type Prepare = fn(u16, usize, &[SocketAddr], &Path) -> (String, Vec<String>);

/// Names, programs and how to start them.
fn known() -> [(&'static str, String, Prepare); 5] {
    let envoy = std::env::var("ENVOY").unwrap_or_else(|_| "envoy".to_owned());
    let warmroute =
        std::env::var("WARMROUTE_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_warmroute").to_owned());
    [
        ("nginx", "nginx".to_owned(), nginx),
        ("haproxy", "haproxy".to_owned(), haproxy),
        ("envoy", envoy, envoy_config),
        ("warmroute random", warmroute.clone(), |port, _, workers, to| {
            warmroute_config(port, workers, to, "random")
        }),
        ("warmroute kv", warmroute, |port, _, workers, to| warmroute_config(port, workers, to, "kv")),
    ]
}

/// Starts everybody that is installed, with a thread of work for each CPU that the bench may use; says who is not.
pub fn start_all(workers: &[SocketAddr], directory: &Path) -> Vec<Contender> {
    let mut all = vec![Contender::direct(workers[0])];
    for (name, program, prepare) in known() {
        let place = directory.join(name.replace(' ', "-"));
        std::fs::create_dir_all(&place).unwrap();
        match Contender::start(name, Command::new(&program), prepare, threads(), workers, &place) {
            Some(contender) => all.push(contender),
            None => println!("{name} is not installed and left out"),
        }
    }
    all
}

/// CPUs that the bench may use.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn wait_for(address: SocketAddr, place: &Path) {
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "no answer: see {}",
            place.join("output").display()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn file(place: &Path) -> String {
    place.join("config").display().to_string()
}

fn nginx(port: u16, threads: usize, workers: &[SocketAddr], place: &Path) -> (String, Vec<String>) {
    let mut servers = String::new();
    workers.iter().for_each(|worker| writeln!(servers, "server {worker};").unwrap());
    let at = |name: &str| place.join(name).display().to_string();
    let (pid, log) = (at("pid"), at("error.log"));
    let master = if threads > 1 { "on" } else { "off" };
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {};\n", at(kind)))
        .concat();
    let config = format!(
        "daemon off; master_process {master}; worker_processes {threads}; pid {pid}; error_log {log};\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; {temporary} keepalive_requests 1000000000; client_max_body_size 64m; client_body_buffer_size 1m;\n\
         upstream workers {{ {servers} keepalive 64; keepalive_requests 1000000000; }}\n\
         server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://workers; proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n"
    );
    (config, vec!["-p".into(), place.display().to_string(), "-e".into(), log, "-c".into(), file(place)])
}

fn haproxy(port: u16, threads: usize, workers: &[SocketAddr], place: &Path) -> (String, Vec<String>) {
    let mut servers = String::new();
    for (at, worker) in workers.iter().enumerate() {
        writeln!(servers, "  server w{at} {worker}").unwrap();
    }
    let config = format!(
        "global\n  nbthread {threads}\n  maxconn 4096\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n\
         frontend front\n  bind 127.0.0.1:{port}\n  default_backend workers\n\
         backend workers\n  balance roundrobin\n  http-reuse always\n{servers}"
    );
    (config, vec!["-db".into(), "-f".into(), file(place)])
}

fn envoy_config(port: u16, threads: usize, workers: &[SocketAddr], place: &Path) -> (String, Vec<String>) {
    let endpoint = |worker: &SocketAddr| {
        format!(
            "{{endpoint: {{address: {{socket_address: {{address: {}, port_value: {}}}}}}}}}",
            worker.ip(),
            worker.port()
        )
    };
    let endpoints: Vec<String> = workers.iter().map(endpoint).collect();
    let config = format!(
        r#"static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: workers, timeout: 0s}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: workers
    type: STATIC
    lb_policy: ROUND_ROBIN
    load_assignment:
      cluster_name: workers
      endpoints: [{{lb_endpoints: [{}]}}]
"#,
        endpoints.join(", ")
    );
    let yaml: PathBuf = place.join("config.yaml");
    std::fs::write(&yaml, &config).unwrap();
    let threads = threads.to_string();
    let arguments = ["--concurrency", &threads, "--log-level", "warn", "--base-id", "77", "-c"];
    let arguments = arguments.map(str::to_owned).into_iter();
    (config, arguments.chain([yaml.display().to_string()]).collect())
}

/// With everything on, as by default, and so a thread for each CPU that it may use.
fn warmroute_config(port: u16, workers: &[SocketAddr], place: &Path, mode: &str) -> (String, Vec<String>) {
    let mut config =
        format!("listen: 127.0.0.1:{port}\nadmin: 127.0.0.1:0\nmode: {mode}\nworkers:\n  static:\n");
    workers.iter().for_each(|worker| writeln!(config, "    - url: http://{worker}").unwrap());
    (config, vec!["serve".into(), "--config".into(), file(place)])
}
