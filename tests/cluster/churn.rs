//! Hundreds of endpoints that never stand still.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use warmroute::testing::{TestRouter, until};

use crate::cases::{ask, is_in_state};
use crate::cluster::{Cluster, Pod, pod};

const ENDPOINTS: u16 = 500;
const IN_A_SLICE: usize = 100;
const CHANGES: usize = 300;
/// So many are there throughout.
const LIVE: u16 = 4;

/// The endpoints of the Service, as the cluster has them.
struct World {
    slices: Vec<BTreeMap<u16, Pod>>,
    base: u16,
    random: StdRng,
    next_uid: u32,
}

impl World {
    fn new(base: u16) -> World {
        let slices = (0..ENDPOINTS as usize / IN_A_SLICE).map(|_| BTreeMap::new()).collect();
        let mut world = World { slices, base, random: StdRng::seed_from_u64(7), next_uid: 10_000 };
        for host in 1..=ENDPOINTS {
            world.slices[usize::from(host - 1) / IN_A_SLICE].insert(host, pod(base + host));
        }
        world
    }

    /// Something happens to a few pods of one slice.
    fn change(&mut self) -> usize {
        let at = self.random.random_range(0..self.slices.len());
        for _ in 0..self.random.random_range(1..10) {
            let host = (at * IN_A_SLICE) as u16 + self.random.random_range(1..=IN_A_SLICE as u16);
            if host <= LIVE {
                continue;
            }
            let old = self.slices[at].get(&host).copied().unwrap_or(pod(self.base + host));
            self.next_uid += 1;
            let new = match self.random.random_range(0..5) {
                0 => None,
                1 => Some(old.not_ready()),
                2 => Some(old.leaving()),
                3 => Some(pod(self.base + host).with_uid(old.uid)),
                _ => Some(pod(self.base + host).with_uid(self.next_uid)),
            };
            match new {
                Some(pod) => drop(self.slices[at].insert(host, pod)),
                None => drop(self.slices[at].remove(&host)),
            }
        }
        at
    }

    fn slice(&self, at: usize) -> Vec<Pod> {
        self.slices[at].values().copied().collect()
    }

    /// As kube-proxy would have it: the ready ones, which there always are some of.
    fn used(&self, cluster: &Cluster) -> BTreeSet<SocketAddr> {
        let pods = self.slices.iter().flat_map(BTreeMap::values);
        pods.filter(|pod| pod.ready).map(|pod| cluster.place(pod.host)).collect()
    }
}

async fn usable(router: &TestRouter) -> BTreeSet<SocketAddr> {
    let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    let workers = page["workers"].as_array().expect("workers").clone();
    let usable = workers.iter().filter(|worker| worker["usable"] == true);
    let address =
        |worker: &Value| worker["url"].as_str().expect("a URL").trim_start_matches("http://").parse();
    usable.map(|worker| address(worker).expect("an address")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_endpoints_churn_and_the_fleet_is_what_kube_proxy_would_use() {
    let (cluster, base) = (Cluster::start("churn").await, Cluster::network());
    let mut engines = Vec::new();
    for host in 1..=LIVE {
        let engine = cluster.engine(base + host).await;
        engine.set_models(if host == 1 { &["m", "x"] } else { &["m"] });
        engines.push(engine);
    }
    let mut world = World::new(base);
    for at in 0..world.slices.len() {
        cluster.put(&format!("slice-{at}"), &world.slice(at)).await;
    }
    let mut config = cluster.config();
    // Nobody is behind most addresses: what Kubernetes says of them is all there is. Where lists of models differ, those that have
    // none are asked for nothing.
    config.health.interval = None;
    config.scrape.interval = None;
    config.scrape.models_interval = Some(std::time::Duration::from_secs(3600));
    let router = Arc::new(TestRouter::start_unready(config, None).await);
    for host in 1..=LIVE {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    until("lists of models", async || {
        router.admin("/fleet").await.matches(r#""m""#).count() >= LIVE as usize
    })
    .await;
    let (over, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load = tokio::spawn({
        let (router, over, answered) = (router.clone(), over.clone(), answered.clone());
        async move {
            while !over.load(Ordering::Relaxed) {
                let number = answered.load(Ordering::Relaxed);
                assert_eq!(ask(&router, &format!("question {number}")).await, 200);
                answered.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    for _ in 0..CHANGES {
        let at = world.change();
        cluster.put(&format!("slice-{at}"), &world.slice(at)).await;
    }
    let wanted = world.used(&cluster);
    until("the fleet to be the cluster's", async || usable(&router).await == wanted).await;
    over.store(true, Ordering::Relaxed);
    load.await.expect("every request is answered");
    println!(
        "{ENDPOINTS} endpoints, {CHANGES} changes of a slice: {} usable in the end, {} requests answered meanwhile",
        wanted.len(),
        answered.load(Ordering::Relaxed)
    );
}
