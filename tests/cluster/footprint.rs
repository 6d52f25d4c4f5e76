//! What the program weighs: its file, the time until it is ready, and its memory at rest.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use warmroute::testing::{Wire, until};

use crate::cluster::{Cluster, pod};

const WORKERS: u16 = 50;

/// Ended with the test, however that ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Of the program in `WARMROUTE_BIN`, or the one that was built with the tests.
#[tokio::test]
#[ignore = "measures, and asserts no time; of use with a release build"]
async fn size_start_and_memory_with_fifty_workers() {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_warmroute"));
    let program = std::env::var_os("WARMROUTE_BIN").map_or(built, PathBuf::from);
    let (cluster, base) = (Cluster::start("footprint").await, Cluster::network());
    let mut engines = Vec::new();
    let pods: Vec<_> = (1..=WORKERS).map(|host| pod(base + host)).collect();
    for pod in &pods {
        engines.push(cluster.engine(pod.host).await);
    }
    cluster.put("slice", &pods).await;
    let admin = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a loopback port");
    let mut config = cluster.config();
    config.admin = admin;
    let file = cluster.file("footprint.yaml");
    fs::write(&file, config.to_yaml()).expect("room on the disk");

    let log = cluster.file("footprint.log");
    let to = fs::File::create(&log).expect("room on the disk");
    let began = Instant::now();
    let child = Command::new(&program).arg("serve").arg("--config").arg(&file).stderr(to).spawn();
    let mut running = Running(child.expect("the program starts"));
    let mut page = String::new();
    let mut ready = None;
    until("all workers to be usable", async || {
        // One that was built of other sources may not know the config.
        if running.0.try_wait().expect("it is ours").is_some() {
            panic!("{} has ended: {}", program.display(), fs::read_to_string(&log).unwrap_or_default());
        }
        if TcpStream::connect(admin).await.is_ok() {
            page = Wire::connect(admin).await.get("/readyz").await.text();
        }
        if page.starts_with("ready") {
            ready.get_or_insert_with(|| began.elapsed());
        }
        page.starts_with(&format!("ready: {WORKERS} of {WORKERS}"))
    })
    .await;
    let all = began.elapsed();
    // At rest: probes and scrapes go on.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let status = fs::read_to_string(format!("/proc/{}/status", running.0.id())).expect("it runs");
    let memory = status.lines().find(|line| line.starts_with("VmRSS")).expect("a line").to_owned();
    println!(
        "{}: {:.1} MB; ready after {:?}, all {WORKERS} workers usable after {all:?}; at rest {memory}",
        program.display(),
        fs::metadata(&program).expect("it is there").len() as f64 / 1e6,
        ready.expect("it was ready")
    );
}
