//! A real kube-apiserver with etcd, started once for the whole run. `tests/kubernetes/run.sh` builds it, makes a network namespace with
//! addresses that Kubernetes takes for a pod's, and ends what was started here.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute::testing::until;

/// Where the programs are; without it, the fake is used.
const PROGRAMS: &str = "WARMROUTE_KUBERNETES_BIN";
const ADMIN: &str = "admin-of-a-test";

pub fn is_there() -> bool {
    std::env::var_os(PROGRAMS).is_some()
}

struct Servers {
    folder: TempDir,
    address: SocketAddr,
    etcd: SocketAddr,
    running: Mutex<Vec<(&'static str, Child)>>,
}

static SERVERS: OnceLock<Servers> = OnceLock::new();

fn program(name: &str) -> PathBuf {
    let folder = std::env::var_os(PROGRAMS).expect("only asked where it is set");
    let own = Path::new(&folder).join(name);
    if own.exists() { own } else { PathBuf::from(name) }
}

/// A port that is free now: neither of the two can be told to pick one.
fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    listener.local_addr().expect("a bound listener has an address")
}

impl Servers {
    fn start() -> Servers {
        let folder = TempDir::new().expect("a folder for files");
        let at = |name: &str| folder.path().join(name);
        let key = rcgen::KeyPair::generate().expect("a key");
        fs::write(at("sa.key"), key.serialize_pem()).expect("room on the disk");
        fs::write(at("sa.pub"), key.public_key_pem()).expect("room on the disk");
        fs::write(at("tokens.csv"), format!("{ADMIN},admin,1,system:masters\n")).expect("room on the disk");
        let servers = Servers { address: free(), etcd: free(), running: Mutex::default(), folder };
        servers.run_etcd();
        servers.run_apiserver();
        servers
    }

    fn run(&self, name: &'static str, arguments: &[String]) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join(format!("{name}.log")))
            .expect("room on the disk");
        let errors = log.try_clone().expect("a file handle");
        let child = Command::new(program(name))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .unwrap_or_else(|error| panic!("{name} cannot be started: {error}"));
        self.running.lock().push((name, child));
    }

    fn run_etcd(&self) {
        let (clients, peers) = (format!("http://{}", self.etcd), format!("http://{}", free()));
        let data = self.folder.path().join("etcd");
        self.run(
            "etcd",
            &[
                format!("--data-dir={}", data.display()),
                format!("--listen-client-urls={clients}"),
                format!("--advertise-client-urls={clients}"),
                format!("--listen-peer-urls={peers}"),
                format!("--initial-advertise-peer-urls={peers}"),
                format!("--initial-cluster=default={peers}"),
                "--unsafe-no-fsync".to_owned(),
            ],
        );
    }

    fn run_apiserver(&self) {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        self.run(
            "kube-apiserver",
            &[
                format!("--etcd-servers=http://{}", self.etcd),
                format!("--secure-port={}", self.address.port()),
                "--bind-address=127.0.0.1".to_owned(),
                "--advertise-address=10.77.0.1".to_owned(),
                "--endpoint-reconciler-type=none".to_owned(),
                "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
                "--authorization-mode=RBAC".to_owned(),
                format!("--cert-dir={}", at("certificates")),
                format!("--token-auth-file={}", at("tokens.csv")),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                format!("--service-account-key-file={}", at("sa.pub")),
                format!("--service-account-signing-key-file={}", at("sa.key")),
            ],
        );
    }

    fn stop_apiserver(&self) {
        let mut running = self.running.lock();
        let at = running.iter().position(|(name, _)| *name == "kube-apiserver").expect("it runs");
        let (_, mut child) = running.swap_remove(at);
        child.kill().expect("it runs");
        child.wait().expect("it was killed");
    }
}

/// A namespace of the API server, with a ServiceAccount that has what `deploy/` gives the router's and nothing else.
pub struct Real {
    servers: &'static Servers,
    namespace: String,
    client: kube::Client,
    pub token_file: PathBuf,
    pub ca: PathBuf,
}

impl Real {
    pub async fn start(namespace: &str) -> Real {
        let servers = SERVERS.get_or_init(Servers::start);
        let ca = servers.folder.path().join("certificates/apiserver.crt");
        until("the API server to make its certificate", async || ca.exists()).await;
        let client = admin(servers, &ca);
        let mut real = Real {
            servers,
            namespace: namespace.to_owned(),
            client,
            token_file: servers.folder.path().join(format!("{namespace}.token")),
            ca,
        };
        real.is_ready().await;
        real.make_namespace().await;
        real
    }

    pub fn address(&self) -> SocketAddr {
        self.servers.address
    }

    async fn is_ready(&mut self) {
        until("the API server to be ready", async || {
            // Its connections may be those of a process that is gone.
            self.client = admin(self.servers, &self.ca);
            let request = http::Request::get("/readyz").body(Vec::new()).expect("a request");
            self.client.request_text(request).await.is_ok()
        })
        .await;
    }

    /// Puts what is in `deploy/` into the namespace, with these of its components.
    pub fn apply_with(&self, components: &[&str]) {
        // Kustomize takes no absolute paths.
        let overlay = self.folder().join(format!("overlay-{}-{}", self.namespace, components.join("-")));
        fs::create_dir(&overlay).expect("room on the disk");
        let up = "../".repeat(overlay.components().count() - 1);
        let deploy = format!("{up}{}/deploy", env!("CARGO_MANIFEST_DIR").trim_start_matches('/'));
        let components: Vec<String> = components.iter().map(|name| format!("{deploy}/{name}")).collect();
        let text =
            format!("namespace: {}\nresources: [{deploy}]\ncomponents: {components:?}\n", self.namespace);
        fs::write(overlay.join("kustomization.yaml"), text).expect("room on the disk");
        let overlay = overlay.display().to_string();
        self.kubectl(&[
            "apply",
            "--server-side",
            "--force-conflicts",
            "--validate=strict",
            "--kustomize",
            &overlay,
        ]);
    }

    /// Where files of the run may lie.
    pub fn folder(&self) -> &Path {
        self.servers.folder.path()
    }

    /// What the chart makes with these values.
    pub fn helm_template(&self, values: &[&str]) -> String {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/warmroute");
        let mut command = Command::new(program("helm"));
        command.args([
            "template",
            "warmroute",
            chart,
            "--kube-version",
            "1.36.0",
            "--namespace",
            &self.namespace,
        ]);
        for value in values {
            command.args(["--set", value]);
        }
        let output = command.env("HOME", self.folder()).output().expect("helm is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// By `helm` against this API server and in this namespace; what it prints.
    pub fn helm(&self, arguments: &[&str]) -> String {
        let output = Command::new(program("helm"))
            .args(["--kube-apiserver", &format!("https://{}", self.servers.address)])
            .args(["--kube-ca-file", &self.ca.display().to_string(), "--kube-token", ADMIN])
            .args(["--namespace", &self.namespace])
            .args(arguments)
            .env("KUBECONFIG", "/dev/null")
            .env("HOME", self.folder())
            .output()
            .expect("helm is there");
        assert!(output.status.success(), "helm {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// By `kubectl` in this namespace, as whoever installs it would.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.run_kubectl(&[arguments, &["--namespace", &self.namespace]].concat());
        assert!(
            output.status.success(),
            "kubectl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Wherever the objects say that they belong.
    pub fn kubectl_anywhere(&self, arguments: &[&str]) {
        let output = self.run_kubectl(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// What it prints, whether it succeeds or not.
    pub fn kubectl_says(&self, arguments: &[&str]) -> String {
        String::from_utf8_lossy(&self.run_kubectl(arguments).stdout).into_owned()
    }

    fn run_kubectl(&self, arguments: &[&str]) -> std::process::Output {
        Command::new(program("kubectl"))
            .args([
                "--server",
                &format!("https://{}", self.servers.address),
                "--certificate-authority",
                &self.ca.display().to_string(),
                "--token",
                ADMIN,
            ])
            .args(arguments)
            .env("KUBECONFIG", "/dev/null")
            .env("HOME", self.servers.folder.path())
            .output()
            .expect("kubectl is there")
    }

    async fn make_namespace(&self) {
        let namespace = json!({"metadata": {"name": self.namespace}});
        Api::<Namespace>::all(self.client.clone())
            .create(&PostParams::default(), &serde_json::from_value(namespace).expect("a namespace"))
            .await
            .expect("the namespace is new");
        self.apply_with(&[]);
        let token = self.kubectl(&["create", "token", "warmroute"]);
        fs::write(&self.token_file, token.trim()).expect("room on the disk");
    }

    fn slices(&self) -> Api<EndpointSlice> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub async fn put(&self, name: &str, slice: Value) {
        self.slices()
            .patch(name, &PatchParams::apply("test").force(), &Patch::Apply(slice))
            .await
            .expect("the slice is taken");
    }

    pub async fn delete(&self, name: &str) {
        self.slices().delete(name, &DeleteParams::default()).await.expect("it is there");
    }

    pub async fn stop(&self) {
        self.servers.stop_apiserver();
    }

    pub async fn start_again(&mut self) {
        self.servers.run_apiserver();
        self.is_ready().await;
    }
}

fn admin(servers: &Servers, ca: &Path) -> kube::Client {
    let url = format!("https://{}", servers.address).parse().expect("an address");
    let mut config = kube::Config::new(url);
    config.root_cert_file = Some(ca.to_owned());
    config.auth_info.token = Some(ADMIN.to_owned().into());
    kube::Client::try_from(config).expect("a client")
}
