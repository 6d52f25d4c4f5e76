//! The binary as its user meets it: what it prints, how it ends.

mod certificates;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use certificates::{Authority, Issued};
use parking_lot::Mutex;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use warmroute::testing::{FakeEngine, Gate, Message, Step, Wire, soon};

fn warmroute(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(arguments).output().expect("the binary runs")
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("room for it");
    file
}

#[test]
fn check_prints_the_effective_config_or_what_is_wrong_with_it() {
    let good = file("workers: {static: [{url: 'http://W:8000/'}]}\nmode: random\n");
    let output = warmroute(&["check", "--config", good.path().to_str().expect("a plain path")]);
    assert!(output.status.success());
    let printed = String::from_utf8(output.stdout).expect("text");
    for line in ["mode: random", "  - url: http://w:8000", "  pool_idle: 4s", "  body: 128MiB"] {
        assert!(printed.contains(line), "{line} is not in\n{printed}");
    }
    for text in ["workers: {static: [{url: 'http://w:8000'}]}\nmod: kv\n", ""] {
        let bad = file(text);
        let path = bad.path().to_str().expect("a plain path");
        for command in ["check", "serve"] {
            let output = warmroute(&[command, "--config", path]);
            let said = String::from_utf8(output.stderr).expect("text");
            assert_eq!(output.status.code(), Some(1));
            assert!(said.starts_with(&format!("warmroute: {path}:")), "{said}");
        }
    }
}

#[test]
fn a_port_in_use_ends_the_start_with_its_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let address = taken.local_addr().expect("a bound listener has an address");
    let config = file(&format!(
        "listen: 127.0.0.1:0\nadmin: {address}\nworkers: {{static: [{{url: 'http://w:8000'}}]}}\n"
    ));
    let output = warmroute(&["serve", "--config", config.path().to_str().expect("a plain path")]);
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains(&format!("warmroute: admin: cannot listen on {address}")), "{said}");
}

/// A running `warmroute serve`; killed if a test fails.
struct Serving {
    child: Child,
    clients: std::net::SocketAddr,
    admin: std::net::SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    /// It is followed, so it must not go.
    _config: tempfile::NamedTempFile,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Serving {
    fn start(engine: &FakeEngine, drain: &str) -> Serving {
        Serving::limited(&[engine], &format!("drain: {drain}"), "-S -n 256")
    }

    /// With more lines of config, and started under the shell's `ulimit`.
    fn limited(engines: &[&FakeEngine], more: &str, ulimit: &str) -> Serving {
        let urls: Vec<_> = engines.iter().map(|engine| format!("{{url: '{}'}}", engine.url())).collect();
        let config = file(&format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nworkers: {{static: [{}]}}\n{more}\n",
            urls.join(", ")
        ));
        Serving::of(config, ulimit)
    }

    fn of(config: tempfile::NamedTempFile, ulimit: &str) -> Serving {
        let mut child = Command::new("sh")
            .args(["-c", &format!("ulimit {ulimit} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_warmroute")])
            .args(["serve", "--config", config.path().to_str().expect("a plain path")])
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let log = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut lines = log.lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("serving")).expect("it says where it serves");
        let address = |key: &str| {
            let text = line.split(key).nth(1).and_then(|rest| rest.split_whitespace().next());
            text.expect(key).parse().expect("an address")
        };
        let (clients, admin) = (address("clients="), address("admin="));
        let log = Arc::new(Mutex::new(Vec::new()));
        std::thread::spawn({
            let log = log.clone();
            move || lines.for_each(|line| log.lock().push(line))
        });
        Serving { child, clients, admin, log, _config: config }
    }

    fn logged(&self, words: &str) -> Vec<String> {
        self.log.lock().iter().filter(|line| line.contains(words)).cloned().collect()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }

    async fn exit_code(mut self) -> Option<i32> {
        soon("the process to end", async move {
            tokio::task::spawn_blocking(move || self.child.wait().expect("our child").code()).await
        })
        .await
        .expect("no panic")
    }

    async fn ready(&self) {
        let ready = async || Wire::connect(self.admin).await.get("/readyz").await.status() == 200;
        warmroute::testing::until("readiness", ready).await;
    }
}

#[tokio::test]
async fn sigterm_lets_a_stream_end_and_exits_with_zero() {
    let engine = FakeEngine::start().await;
    let serving = Serving::start(&engine, "{announce: 0s, deadline: 1h}");
    serving.ready().await;
    let gate = Gate::default();
    engine.next(vec![
        Step::stream_head(),
        Step::Await(gate.clone()),
        Step::chunk("data: 1\n\n"),
        Step::last_chunk(),
    ]);
    let mut client = Wire::connect(serving.clients).await;
    client.send("GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let (head, raw) = client.head().await.expect("a response");
    serving.signal("TERM");
    let refused = async || tokio::net::TcpStream::connect(serving.clients).await.is_err();
    warmroute::testing::until("connections to be refused", refused).await;
    gate.open();
    let answer = client.body(head, raw, "GET").await;
    assert!(answer.complete);
    assert_eq!(serving.exit_code().await, Some(0));
}

#[tokio::test]
async fn a_second_signal_ends_at_once_and_says_so_in_the_exit_code() {
    let engine = FakeEngine::start().await;
    let serving = Serving::start(&engine, "{announce: 1h, deadline: 2h}");
    serving.ready().await;
    engine.next(vec![Step::stream_head(), Step::AwaitClose]);
    let mut client = Wire::connect(serving.clients).await;
    client.send("GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await;
    client.head().await.expect("a response");
    serving.signal("TERM");
    let leaving = async || Wire::connect(serving.admin).await.get("/readyz").await.status() == 503;
    warmroute::testing::until("readiness to go", leaving).await;
    serving.signal("INT");
    assert_eq!(serving.exit_code().await, Some(3));
}

#[tokio::test]
async fn as_many_threads_serve_clients_as_the_environment_says() {
    let engine = FakeEngine::start().await;
    let serving =
        Serving::limited(&[&engine], "drain: {announce: 0s}", "-S -n 256 && export TOKIO_WORKER_THREADS=3");
    serving.ready().await;
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(Wire::connect(serving.clients).await);
    }
    for client in &mut clients {
        assert_eq!(client.post("/v1/chat/completions", "{}").await.status(), 200);
    }
    #[cfg(target_os = "linux")]
    {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", serving.child.id())).expect("our child's");
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
        let named = tasks.flatten().filter_map(name).filter(|name| name.starts_with("serve-")).count();
        assert_eq!(named, 3);
    }
    serving.signal("TERM");
    assert_eq!(serving.exit_code().await, Some(0));
}

#[test]
fn a_number_of_threads_that_is_none_is_refused() {
    let config =
        file("listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nworkers: {static: [{url: 'http://w:8000'}]}\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.env("TOKIO_WORKER_THREADS", "0");
    let path = config.path().to_str().expect("a plain path");
    let output = command.args(["serve", "--config", path]).output().expect("the binary runs");
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("TOKIO_WORKER_THREADS: \"0\" is no number above 0"), "{said}");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_limit_on_open_files_is_raised_as_far_as_it_goes() {
    let engine = FakeEngine::start().await;
    let serving = Serving::limited(&[&engine], "", "-S -n 64");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", serving.child.id())).expect("our child");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line for it");
    let values: Vec<_> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(values[0], values[1], "{line}");
    assert_ne!(values[0], "64");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn out_of_open_files_is_no_fault_of_the_worker() {
    // A file that the process held for a moment may be free again when the request comes: then nothing is shown.
    for _ in 0..8 {
        if refuses_when_out_of_open_files().await {
            return;
        }
    }
    panic!("there was a file left each time");
}

/// False if a file was free after all.
#[cfg(target_os = "linux")]
async fn refuses_when_out_of_open_files() -> bool {
    const FILES: usize = 40;
    let engine = FakeEngine::start().await;
    let serving = Serving::limited(
        &[&engine],
        "health: {interval: off}\nscrape: {interval: off}",
        &format!("-n {FILES}"),
    );
    let mut clients = Vec::new();
    for _ in 0..FILES {
        clients.push(Wire::connect(serving.clients).await);
    }
    let folder = format!("/proc/{}/fd", serving.child.id());
    // What it has inherited may have numbers above the limit.
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<usize>().ok();
    let all_taken = async || {
        let open = std::fs::read_dir(&folder).expect("our child").filter_map(|entry| number(entry.ok()?));
        open.filter(|number| *number < FILES).count() == FILES
    };
    warmroute::testing::until("all open files to be in use", all_taken).await;
    for _ in 0..5 {
        let answer = clients[0].get("/v1/models").await;
        if answer.status() == 200 {
            return false;
        }
        assert_eq!((answer.status(), engine.seen().len()), (503, 0), "{}", answer.text());
    }
    clients.truncate(1);
    let served = async { while clients[0].get("/v1/models").await.status() != 200 {} };
    soon("a file to be free again", served).await;
    assert_eq!(engine.seen().len(), 1);
    true
}

#[tokio::test]
async fn what_fails_for_everybody_is_told_once_and_then_counted() {
    const WORDS: &str = "request not served: no worker can take the request";
    let mut engine = FakeEngine::start().await;
    let serving = Serving::start(&engine, "{announce: 0s}");
    serving.ready().await;
    engine.kill().await;
    let mut client = Wire::connect(serving.clients).await;
    let down = async || client.get("/v1/models").await.text().contains("no_server_available");
    warmroute::testing::until("the worker to be out", down).await;
    for _ in 0..200 {
        assert_eq!(client.get("/v1/models").await.status(), 503);
    }
    assert_eq!(serving.logged(WORDS).len(), 1, "{:?}", serving.logged(WORDS));
    let again = |line: &String| line.split("again=").nth(1)?.parse::<u64>().ok();
    let told = async || serving.logged(WORDS).iter().filter_map(again).sum::<u64>() == 200;
    warmroute::testing::until("the others to be told", told).await;
    assert!(serving.logged(WORDS).len() < 10, "{:?}", serving.logged(WORDS));
}

#[tokio::test]
async fn a_request_that_another_worker_answered_is_not_logged_as_failed() {
    let mut dead = FakeEngine::start().await;
    let engine = FakeEngine::start().await;
    let config = "mode: random\nrandom: {draw: request}\nhealth: {interval: off}\nscrape: {interval: off}\nretries: {attempts: 3}";
    let serving = Serving::limited(&[&dead, &engine], config, "-S -n 256");
    dead.kill().await;
    let mut client = Wire::connect(serving.clients).await;
    let page = async || Wire::connect(serving.admin).await.get("/metrics").await.text();
    let retried = async || {
        assert_eq!(client.get("/v1/models").await.status(), 200);
        page().await.lines().any(|line| {
            line.starts_with(r#"warmroute_retries_total{cause="connect"}"#) && !line.ends_with(" 0")
        })
    };
    warmroute::testing::until("a request to be retried", retried).await;
    // Told after the retries, so that what was logged of them is here.
    let out = async || {
        assert_eq!(client.get("/v1/models").await.status(), 200);
        !serving.logged("worker is out").is_empty()
    };
    warmroute::testing::until("the dead worker to be out", out).await;
    assert!(serving.logged("request failed").is_empty(), "{:?}", serving.logged("request failed"));
}

/// The certificate that is shown, in DER.
async fn shown(to: std::net::SocketAddr, authority: &Authority) -> Vec<u8> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("PEM"))
        .expect("an authority");
    let config = ClientConfig::builder_with_provider(warmroute::config::tls::provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = tokio::net::TcpStream::connect(to).await.expect("the proxy takes connections");
    let name = ServerName::try_from("proxy.test").expect("a name");
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
    let stream = soon("a handshake", connecting).await.expect("a good certificate");
    stream.get_ref().1.peer_certificates().expect("one")[0].to_vec()
}

#[tokio::test]
async fn a_new_certificate_is_taken_up_and_a_bad_pair_is_not() {
    const REFUSED: &str = "the new certificate is refused and the old one stays in force";
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let issued = || authority.issue(&["proxy.test"]);
    let der = |issued: &Issued| {
        CertificateDer::from_pem_slice(issued.certificate.as_bytes()).expect("PEM").to_vec()
    };
    let (old, new) = (issued(), issued());
    let certificate = authority.file("tls.crt", &old.certificate);
    let key = authority.file("tls.key", &old.key);
    let tls = format!("tls: {{certificate: {}, key: {}}}", certificate.display(), key.display());
    let serving = Serving::limited(&[&engine], &tls, "-S -n 256");
    assert_eq!(shown(serving.clients, &authority).await, der(&old));

    authority.file("tls.crt", &new.certificate);
    let refused = async || !serving.logged(REFUSED).is_empty();
    warmroute::testing::until("the bad pair to be noticed", refused).await;
    assert!(
        serving.logged(REFUSED)[0].contains("is not the key of tls.certificate"),
        "{:?}",
        serving.logged(REFUSED)
    );
    assert_eq!(shown(serving.clients, &authority).await, der(&old));

    authority.file("tls.key", &new.key);
    let taken = async || shown(serving.clients, &authority).await == der(&new);
    warmroute::testing::until("the new pair to be in force", taken).await;

    std::fs::remove_file(&certificate).expect("it was there");
    let gone = async || serving.logged(REFUSED).len() == 2;
    warmroute::testing::until("the missing file to be noticed", gone).await;
    assert_eq!(shown(serving.clients, &authority).await, der(&new));
    assert_eq!(serving.logged(REFUSED).len(), 2, "each is told once");
}

#[tokio::test]
async fn why_a_worker_in_tls_is_not_taken_is_in_the_log() {
    let engine = FakeEngine::start().await;
    let config = file(&format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nworkers: {{static: [{{url: 'https://{}'}}]}}\n",
        engine.address()
    ));
    let serving = Serving::of(config, "-S -n 256");
    let told = async || !serving.logged("health probe failed: no TLS connection: ").is_empty();
    warmroute::testing::until("the fault to be told", told).await;
    assert_eq!(Wire::connect(serving.clients).await.get("/v1/models").await.status(), 503);
}

#[tokio::test]
async fn a_hangup_with_the_file_as_it_was_leaves_a_switched_mode() {
    let engine = FakeEngine::start().await;
    let serving = Serving::start(&engine, "{announce: 0s}");
    let mut admin = Wire::connect(serving.admin).await;
    admin.send("PUT /mode HTTP/1.1\r\nhost: a\r\ncontent-length: 6\r\n\r\nrandom").await;
    assert_eq!(admin.answer("PUT").await.expect("an answer").status(), 200);
    serving.signal("HUP");
    let read = async || !serving.logged("the config was read again and says the same").is_empty();
    warmroute::testing::until("the file to be read", read).await;
    assert!(admin.get("/mode").await.text().contains("random"));
}

#[tokio::test]
async fn a_shadow_that_holds_too_little_to_say_anything_is_told_once() {
    let engine = FakeEngine::start().await;
    let config = |one_in: &str| {
        file(&format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nshadow: {{one_in: {one_in}}}\nworkers: {{static: [{{url: '{}', capacity_tokens: \
             100000}}]}}\n",
            engine.url()
        ))
    };
    let rare = Serving::of(config("512"), "-S -n 256");
    let told = async || !rare.logged("shadow.one_in: 1 in 512 leaves too few blocks").is_empty();
    warmroute::testing::until("it to be told", told).await;
    rare.ready().await;
    for enough in ["4", "auto", "1", "off"] {
        let serving = Serving::of(config(enough), "-S -n 256");
        serving.ready().await;
        let (rare, fair) = (rare.logged("too few blocks").len(), serving.logged("too few blocks").len());
        assert_eq!((rare, fair), (1, 0), "{enough}");
    }
}

/// As logrotate has it: the file is moved, and a signal says so.
#[tokio::test]
async fn a_hangup_begins_the_access_log_anew() {
    let engine = FakeEngine::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let (log, moved) = (folder.path().join("access.jsonl"), folder.path().join("access.jsonl.1"));
    let serving =
        Serving::limited(&[&engine], &format!("log: {{access: {{to: {}}}}}", log.display()), "-S -n 256");
    serving.ready().await;
    let lines = |of: &std::path::Path| std::fs::read_to_string(of).unwrap_or_default().lines().count();
    let mut client = Wire::connect(serving.clients).await;
    client.get("/v1/models").await;
    warmroute::testing::until("a first line", async || lines(&log) == 1).await;
    std::fs::rename(&log, &moved).expect("it is there");
    serving.signal("HUP");
    let heard = async || !serving.logged("the config was read again").is_empty();
    warmroute::testing::until("the signal to be heard", heard).await;
    client.get("/v1/models").await;
    warmroute::testing::until("a line in the new file", async || lines(&log) == 1).await;
    assert_eq!(lines(&moved), 1);
}

#[tokio::test]
async fn an_access_log_that_cannot_be_written_says_so_once() {
    let engine = FakeEngine::start().await;
    let serving = Serving::limited(&[&engine], "log: {access: {to: /dev/full}}", "-S -n 256");
    serving.ready().await;
    let mut client = Wire::connect(serving.clients).await;
    for _ in 0..5 {
        client.get("/v1/models").await;
    }
    let lost = "warmroute_access_log_lost_total 5";
    let counted = async || Wire::connect(serving.admin).await.get("/metrics").await.text().contains(lost);
    warmroute::testing::until("the lines to be counted", counted).await;
    assert_eq!(serving.logged("log.access: lines cannot be written and are lost").len(), 1);
}

#[tokio::test]
async fn nothing_of_prompts_answers_and_keys_is_in_logs_errors_or_metrics() {
    const MARKS: [&str; 4] = ["marked-prompt", "marked-answer", "marked-key", "marked-cookie"];
    let mut engine = FakeEngine::start().await;
    let serving = Serving::limited(&[&engine], "log: {level: trace}\nlimits: {body: 10KB}", "-S -n 256");
    serving.ready().await;
    let chat = r#"{"messages":[{"role":"user","content":"marked-prompt"}],"stream":true}"#;
    let whole = Step::json("200 OK", r#"{"text":"marked-answer"}"#);
    let half = Step::send("HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nmarked-answer");
    let nonsense = Step::send("marked-answer\r\n\r\n");
    let stream = vec![Step::stream_head(), Step::chunk("data: marked-answer\n\n"), Step::Reset];
    let large = format!("{chat}{}", " marked-prompt".repeat(1_000));
    let mut said = String::new();
    for (body, steps) in [
        (chat, vec![whole]),
        (chat, vec![Step::json("500 Internal Server Error", r#"{"error":"marked-answer"}"#)]),
        (chat, vec![half, Step::Close]),
        (chat, vec![nonsense, Step::Close]),
        (chat, stream),
        (chat, vec![Step::Reset]),
        ("{\"messages\": marked-prompt", vec![Step::json("400 Bad Request", "{}")]),
        (&large, vec![]),
    ] {
        if !steps.is_empty() {
            engine.next(steps);
        }
        let mut client = Wire::connect(serving.clients).await;
        let length = body.len();
        client
            .send(format!(
                "POST /v1/chat/completions?q=marked-prompt HTTP/1.1\r\nhost: a\r\nauthorization: Bearer marked-key\r\n\
                 x-api-key: marked-key\r\ncookie: marked-cookie\r\ncontent-length: {length}\r\n\r\n{body}"
            ))
            .await;
        let answer = client.answer("POST").await.expect("an answer");
        // What the worker said is the client's to read.
        if !answer.text().contains("marked-answer") {
            said += &answer.text();
        }
    }
    engine.kill().await;
    let mut client = Wire::connect(serving.clients).await;
    said += &client.post("/v1/chat/completions", chat).await.text();
    for path in ["/metrics", "/fleet", "/"] {
        said += &Wire::connect(serving.admin).await.get(path).await.text();
    }
    let out = async || !serving.logged("worker is out").is_empty();
    warmroute::testing::until("the end of it to be logged", out).await;
    assert!(!serving.logged("DEBUG").is_empty(), "{:?}", serving.log.lock());
    for mark in MARKS {
        assert!(!said.contains(mark), "{mark}: {said}");
        assert!(serving.logged(mark).is_empty(), "{:?}", serving.logged(mark));
    }
}

#[tokio::test]
async fn a_worker_that_wants_a_key_for_its_pages_is_shown_it() {
    let engine = FakeEngine::start().await;
    let answer = |message: &Message, body: &str| match message.head.get("authorization") {
        Some("Bearer the-key") => vec![Step::json("200 OK", body)],
        _ => vec![Step::json("401 Unauthorized", r#"{"error":"Unauthorized"}"#)],
    };
    engine.set_probed(move |message| answer(message, ""));
    engine.set_metrics(move |message| answer(message, "vllm:num_requests_running 0\n"));
    engine.set_listing(move |message| answer(message, r#"{"data":[{"id":"m"}]}"#));
    let key = file("the-key\n");
    let with = |key: &str| {
        file(&format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nworkers: {{static: [{{url: '{}'}}], api_key_file: {key}}}\n",
            engine.url()
        ))
    };
    let serving = Serving::of(with(key.path().to_str().expect("a plain path")), "-S -n 256");
    serving.ready().await;
    let page = async || Wire::connect(serving.admin).await.get("/metrics").await.text();
    let models = format!(r#"warmroute_worker_models{{worker="{}"}} 1"#, engine.address());
    warmroute::testing::until("its list to be read", async || page().await.contains(&models)).await;
    // Clients present their own.
    let mut client = Wire::connect(serving.clients).await;
    client.send("GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer theirs\r\n\r\n").await;
    assert_eq!(client.answer("GET").await.expect("an answer").status(), 200);
    assert_eq!(client.get("/v1/models").await.status(), 200);
    let seen = engine.seen();
    let shown: Vec<_> = seen.iter().map(|seen| seen.head.get("authorization")).collect();
    assert_eq!(shown, [Some("Bearer theirs"), None]);

    let other = file("another-key");
    let serving = Serving::of(with(other.path().to_str().expect("a plain path")), "-S -n 256");
    let told = async || !serving.logged("health probe failed: answered 401").is_empty();
    warmroute::testing::until("the refusal to be told", told).await;
    assert_eq!(Wire::connect(serving.clients).await.get("/v1/models").await.status(), 503);
}
