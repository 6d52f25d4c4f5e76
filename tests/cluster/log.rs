//! What the program's log says of sources and workers, and how many words it makes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::TcpStream;
use warmroute::testing::{Wire, until};

use crate::cluster::{Cluster, pod};

/// The program, with its log. Ended with the test, however that ends.
struct Program {
    child: Child,
    admin: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

impl Program {
    async fn start(cluster: &Cluster) -> Program {
        let admin = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let admin = admin.expect("a loopback port");
        let mut config = cluster.config();
        config.admin = admin;
        let file = cluster.file(&format!("{}.yaml", cluster.namespace));
        fs::write(&file, config.to_yaml()).expect("room on the disk");
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        let child = command.arg("serve").arg("--config").arg(&file).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the program starts");
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let to = log.clone();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| to.lock().push(line)));
        let program = Program { child, admin, log };
        until("the program to serve", async || TcpStream::connect(admin).await.is_ok()).await;
        program
    }

    async fn page(&self, path: &str) -> String {
        Wire::connect(self.admin).await.get(path).await.text()
    }

    fn logged(&self, words: &str) -> Vec<String> {
        self.log.lock().iter().filter(|line| line.contains(words)).cloned().collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_watch_that_is_refused_after_each_list_is_said_once_and_so_is_its_end() {
    let (cluster, base) = (Cluster::start("refused").await, Cluster::network());
    let Some(fake) = cluster.fake() else {
        println!("skipped: the fake takes rights away on demand");
        return;
    };
    cluster.put("slice", &[pod(base + 1)]).await;
    fake.deny_watch(true);
    let program = Program::start(&cluster).await;
    let synced = format!(r#"warmroute_discovery_synced{{source="kubernetes:{}/vllm"}}"#, cluster.namespace);
    // From the first failure on.
    until("a second try", async || fake.lists() > 1).await;
    until("many tries", async || {
        assert!(!program.page("/metrics").await.contains(&format!("{synced} 1")), "one list is not all");
        fake.lists() > 5
    })
    .await;
    let said = program.logged("goes on with the last known workers");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("cannot watch"), "{said:?}");
    assert!(program.logged("heard again").is_empty());
    fake.deny_watch(false);
    until("it to be heard", async || !program.logged("heard again").is_empty()).await;
    assert!(program.page("/metrics").await.contains(&format!("{synced} 1")));
    let lists = fake.lists();
    until("another list", async || fake.lists() > lists).await;
    assert_eq!(program.logged("heard again").len(), 1);
}

#[tokio::test]
async fn a_source_that_has_told_nothing_yet_is_not_said_to_go_on() {
    let cluster = Cluster::start("never").await;
    let Some(fake) = cluster.fake() else {
        println!("skipped: the fake takes rights away on demand");
        return;
    };
    fake.deny(true);
    let program = Program::start(&cluster).await;
    until("the fault to be told", async || {
        !program.logged("has not told of any worker yet: the API server answers 403").is_empty()
    })
    .await;
    assert!(program.logged("goes on with the last known").is_empty());
}

#[tokio::test]
async fn a_thousand_workers_that_come_at_once_are_a_few_lines() {
    const WORKERS: usize = 1000;
    let (cluster, base) = (Cluster::start("crowd").await, Cluster::network());
    let pods: Vec<_> = (1..=WORKERS as u16).map(|host| pod(base + host)).collect();
    for (at, pods) in pods.chunks(100).enumerate() {
        cluster.put(&format!("slice-{at}"), pods).await;
    }
    let program = Program::start(&cluster).await;
    // Nobody listens there, so there is more than one thing to be said of each.
    until("all to be found dead, and that to be logged", async || {
        let dead = program.logged("health probes failed");
        let counted = |line: &String| line.split("workers=").nth(1)?.split(' ').next()?.parse::<usize>().ok();
        dead.iter().filter_map(counted).sum::<usize>() + program.logged("health probe failed").len()
            >= WORKERS
    })
    .await;
    assert_eq!(program.logged("workers joined").len(), 1);
    let lines = program.log.lock().len();
    println!("{WORKERS} workers that join and are found dead: {lines} lines");
    assert!(lines < WORKERS / 10, "{:#?}", program.log.lock());
}
