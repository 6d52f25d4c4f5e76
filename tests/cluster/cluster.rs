//! A cluster as the router sees it: an API server, real or fake, behind a link that can be held and cut, and pods in its EndpointSlices.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute::config::{Config, KubernetesApi, Mode};
use warmroute::testing::{FakeEngine, TestRouter};

use crate::fake::{self, Fake};
use crate::link::Link;
use crate::real::{self, Real};

/// Short, so that what is only made up for by a new list does not keep the tests waiting.
pub const RESYNC: Duration = Duration::from_secs(2);

enum Server {
    Fake { fake: Fake, files: TempDir },
    Real(Box<Real>),
}

pub struct Cluster {
    server: Server,
    pub link: Link,
    pub namespace: String,
    port: u16,
}

/// An endpoint of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Pod {
    pub host: u16,
    pub uid: u32,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
}

/// A pod that is well.
pub fn pod(host: u16) -> Pod {
    Pod { host, uid: u32::from(host), ready: true, serving: true, terminating: false }
}

impl Pod {
    pub fn not_ready(self) -> Pod {
        Pod { ready: false, serving: false, ..self }
    }

    /// On its way out, its readiness probe still passing.
    pub fn leaving(self) -> Pod {
        Pod { ready: false, serving: true, terminating: true, ..self }
    }

    pub fn with_uid(self, uid: u32) -> Pod {
        Pod { uid, ..self }
    }
}

/// Hosts of a test are its own, since all tests of the real API server have one network.
static NETWORKS: AtomicU16 = AtomicU16::new(0);

impl Cluster {
    pub async fn start(name: &str) -> Cluster {
        let (server, address) = if real::is_there() {
            let real = Real::start(name).await;
            let address = real.address();
            (Server::Real(Box::new(real)), address)
        } else {
            let fake = Fake::start(name).await;
            let files = TempDir::new().expect("a folder for files");
            fs::write(files.path().join("token"), fake::TOKEN).expect("room on the disk");
            let address = fake.address;
            (Server::Fake { fake, files }, address)
        };
        // One port for all engines, as the pods of a Service have.
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        Cluster {
            server,
            link: Link::to(address).await,
            namespace: name.to_owned(),
            port: port.expect("a loopback port").port(),
        }
    }

    /// Where a pod has its address. Kubernetes takes no loopback addresses for a pod's, so with the real one they are others, in a
    /// network namespace of the test's own.
    pub fn place(&self, host: u16) -> SocketAddr {
        let first = if real::is_there() { [10, 77] } else { [127, 77] };
        let [high, low] = host.to_be_bytes();
        SocketAddr::from(([first[0], first[1], high, low], self.port))
    }

    pub async fn engine(&self, host: u16) -> FakeEngine {
        FakeEngine::start_at(self.place(host)).await
    }

    /// A config that follows the Service `vllm`.
    pub fn config(&self) -> Config {
        self.config_of("{service: vllm, NAMESPACE}")
    }

    /// With these entries of `workers.kubernetes`, in which `NAMESPACE` stands for this cluster's.
    pub fn config_of(&self, entries: &str) -> Config {
        let entries = entries.replace("NAMESPACE", &format!("namespace: {}", self.namespace));
        let text = format!("workers: {{kubernetes: [{entries}]}}");
        let parsed = Config::parse(&text, Path::new("c.yaml")).expect("entries that are taken");
        let mut config = TestRouter::config(Mode::Kv, &[]);
        config.workers = parsed.workers;
        config.workers.kubernetes_api = self.api();
        config.health.unreachable_silence = Some(Duration::from_millis(200));
        config
    }

    fn api(&self) -> KubernetesApi {
        let address = self.link.address;
        match &self.server {
            Server::Fake { files, .. } => KubernetesApi {
                url: Some(format!("http://{address}")),
                ca: None,
                token_file: Some(files.path().join("token")),
                resync: RESYNC,
            },
            Server::Real(real) => KubernetesApi {
                url: Some(format!("https://{address}")),
                ca: Some(real.ca.clone()),
                token_file: Some(real.token_file.clone()),
                resync: RESYNC,
            },
        }
    }

    /// Another token in the file that the router was given.
    pub fn set_token(&self, token: &str) {
        if let Server::Fake { files, .. } = &self.server {
            fs::write(files.path().join("token"), token).expect("room on the disk");
        }
    }

    /// Where a file of the test may lie.
    pub fn file(&self, name: &str) -> PathBuf {
        match &self.server {
            Server::Fake { files, .. } => files.path().join(name),
            Server::Real(real) => real.folder().join(name),
        }
    }

    /// The fake, for what a real one cannot be made to do.
    pub fn fake(&self) -> Option<&Fake> {
        match &self.server {
            Server::Fake { fake, .. } => Some(fake),
            Server::Real(_) => None,
        }
    }

    pub fn real(&self) -> Option<&Real> {
        match &self.server {
            Server::Fake { .. } => None,
            Server::Real(real) => Some(real),
        }
    }

    pub async fn put(&self, name: &str, pods: &[Pod]) {
        self.put_of("vllm", name, &[("http", self.port)], pods).await;
    }

    pub async fn put_of(&self, service: &str, name: &str, ports: &[(&str, u16)], pods: &[Pod]) {
        let slice = self.slice(service, name, ports, pods);
        match &self.server {
            Server::Fake { fake, .. } => fake.put(name, slice),
            Server::Real(real) => real.put(name, slice).await,
        }
    }

    fn slice(&self, service: &str, name: &str, ports: &[(&str, u16)], pods: &[Pod]) -> Value {
        let endpoint = |pod: &Pod| {
            json!({
                "addresses": [self.place(pod.host).ip().to_string()],
                "conditions": {"ready": pod.ready, "serving": pod.serving, "terminating": pod.terminating},
                "targetRef": {
                    "kind": "Pod", "namespace": self.namespace, "name": format!("pod-{}", pod.uid),
                    "uid": format!("00000000-0000-0000-0000-{:012}", pod.uid),
                },
                "zone": format!("zone-{}", pod.host % 2),
            })
        };
        let port = |(name, number): &(&str, u16)| json!({"name": name, "port": number, "protocol": "TCP"});
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": name, "namespace": self.namespace,
                "labels": {"kubernetes.io/service-name": service, "team": "a"},
            },
            "ports": ports.iter().map(port).collect::<Vec<_>>(),
            "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub async fn delete(&self, name: &str) {
        match &self.server {
            Server::Fake { fake, .. } => fake.delete(name),
            Server::Real(real) => real.delete(name).await,
        }
    }

    /// The API server ends, and its connections with it.
    pub async fn stop_api(&mut self) {
        match &self.server {
            Server::Fake { .. } => self.link.cut().await,
            Server::Real(real) => real.stop().await,
        }
    }

    pub async fn start_api(&mut self) {
        match &mut self.server {
            Server::Fake { .. } => self.link.open().await,
            Server::Real(real) => real.start_again().await,
        }
    }

    /// A number for hosts that no other test has.
    pub fn network() -> u16 {
        256 * NETWORKS.fetch_add(8, Ordering::Relaxed)
    }
}
