//! What is in `deploy/`, put into a real API server: everything is taken, the router's rights are enough and no more, and a Service can be
//! taken over and given back as docs/migrate.md says.

use std::fs;
use std::path::Path;

use serde_json::Value;
use warmroute::config::{Config, Mode, SplitBy};

use crate::cluster::Cluster;

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy");

const SKIPPED: &str = "skipped: only a real API server checks what it is given";

#[tokio::test]
async fn all_of_deploy_is_taken() {
    let cluster = Cluster::start("deploy").await;
    let Some(real) = cluster.real() else { return println!("{SKIPPED}") };
    // The base is there already: it is where the token comes from.
    let deployment: Value =
        serde_json::from_str(&real.kubectl(&["get", "deployment", "warmroute", "-o", "json"])).expect("JSON");
    assert_eq!(deployment["spec"]["replicas"], 1);
    real.kubectl(&["apply", "--server-side", "--validate=strict", "-f", &format!("{DEPLOY}/vllm.yaml")]);
    real.apply_with(&["autoscaling"]);
    let scaler = real.kubectl(&["get", "hpa", "warmroute", "-o", "jsonpath={.spec.maxReplicas}"]);
    assert_eq!(scaler, "6");
    // The chart with all that can be switched on, but for what needs CRDs.
    let values = [
        "autoscaling.enabled=true",
        "hashKeySecret=hash",
        "apiKeySecret=key",
        "service.name=vllm",
        "workersService.selector.app=vllm",
        "workersService.name=a",
        "workers[0].service=a",
        "workers[0].port=http",
        "workers[1].service=b",
        "workers[1].namespace=default",
        "podLabels.team=a",
        "imagePullSecrets[0].name=pull",
        "priorityClassName=system-cluster-critical",
        "networkPolicy.clients[0].podSelector.matchLabels.app=client",
        "config.drain.announce=10s",
    ];
    let made = real.folder().join("everything.yaml");
    fs::write(&made, real.helm_template(&values)).expect("room on the disk");
    real.kubectl_anywhere(&[
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        &made.display().to_string(),
    ]);
    let roles = real.helm_template(&values).matches("\nkind: Role\n").count();
    assert_eq!(roles, 2, "one in each namespace that workers are in");
}

#[tokio::test]
async fn the_routers_rights_are_to_see_its_workers_and_nothing_else() {
    let cluster = Cluster::start("rights").await;
    let Some(real) = cluster.real() else { return println!("{SKIPPED}") };
    let account = format!("system:serviceaccount:{}:warmroute", cluster.namespace);
    let may = |verb: &str, what: &str, namespace: &str| {
        let said =
            real.kubectl_says(&["auth", "can-i", verb, what, "--as", &account, "--namespace", namespace]);
        said.trim() == "yes"
    };
    for verb in ["list", "watch"] {
        assert!(may(verb, "endpointslices.discovery.k8s.io", &cluster.namespace), "{verb}");
    }
    for (verb, what) in [
        ("get", "secrets"),
        ("list", "secrets"),
        ("list", "pods"),
        ("get", "configmaps"),
        ("update", "endpointslices.discovery.k8s.io"),
        ("delete", "endpointslices.discovery.k8s.io"),
        ("create", "pods"),
        ("patch", "services"),
    ] {
        assert!(!may(verb, what, &cluster.namespace), "{verb} {what}");
    }
    assert!(!may("list", "endpointslices.discovery.k8s.io", "kube-system"));
}

/// The Services that docs/migrate.md has a patch for: its place among the guide's patches, what the Service is made with, and the port
/// that clients use.
const SHAPES: [(usize, &str); 3] = [
    (0, r#"{"ports": [{"port": 80, "targetPort": 8000}]}"#),
    (
        1,
        r#"{"ports": [{"name": "http", "port": 80, "targetPort": 8000}, {"name": "metrics", "port": 9400}]}"#,
    ),
    (0, r#"{"clusterIP": "None", "ports": [{"port": 8000}]}"#),
];

#[tokio::test]
async fn services_of_all_shapes_are_taken_over_and_given_back() {
    let cluster = Cluster::start("migrate").await;
    let Some(real) = cluster.real() else { return println!("{SKIPPED}") };
    let guide =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/migrate.md")).expect("the guide");
    let patches: Vec<&str> =
        guide.split("--type=json -p '").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
    for (patch, spec) in SHAPES {
        let mut spec: Value = serde_json::from_str(spec).expect("JSON");
        spec["selector"] = serde_json::json!({"app": "vllm"});
        let service = serde_json::json!(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "vllm"}, "spec": spec}
        );
        let file = real.folder().join("service.json");
        fs::write(&file, service.to_string()).expect("room on the disk");
        real.kubectl(&["create", "-f", &file.display().to_string()]);
        let of =
            |path: &str| real.kubectl(&["get", "service", "vllm", "-o", &format!("jsonpath={{{path}}}")]);
        let all = || [".spec.clusterIP", ".spec.selector", ".spec.ports"].map(of);
        let before = all();
        // As the guide's shell puts it together.
        let back = real.folder().join("back.json");
        let template = guide
            .split("echo '")
            .nth(1)
            .and_then(|rest| rest.split("' > back.json").next())
            .expect("it is there");
        fs::write(&back, template.replace("'$selector'", &before[1]).replace("'$ports'", &before[2]))
            .expect("room on the disk");
        real.kubectl(&["patch", "service", "vllm", "--type=json", "-p", patches[patch]]);
        assert_eq!(of(".spec.clusterIP"), before[0], "clients notice nothing");
        let taken: Value = serde_json::from_str(&of(".spec.selector")).expect("JSON");
        let labels = "jsonpath={.spec.template.metadata.labels}";
        let pods = real.kubectl(&["get", "deployment", "warmroute", "-o", labels]);
        assert_eq!(
            taken,
            serde_json::from_str::<Value>(&pods).expect("JSON"),
            "it selects the router's pods"
        );
        assert_eq!(of(".spec.ports[*].targetPort"), "http", "each port is one that the router listens on");
        let back = back.display().to_string();
        real.kubectl(&["patch", "service", "vllm", "--type=json", "--patch-file", &back]);
        assert_eq!(all(), before);
        real.kubectl(&["delete", "service", "vllm"]);
    }
}

#[tokio::test]
async fn the_chart_is_installed_and_upgraded_as_the_guide_says() {
    let cluster = Cluster::start("chart").await;
    let Some(real) = cluster.real() else { return println!("{SKIPPED}") };
    let chart = format!("{DEPLOY}/helm/warmroute");
    // The objects of the plain manifests are there already, so it has another name.
    let first =
        ["install", "second", &chart, "--set", "mode=random", "--set", "workersService.selector.app=vllm"];
    let said = real.helm(&first);
    assert!(said.contains("The mode is random") && !said.contains("WARNING"), "{said}");
    let text = || real.kubectl(&["get", "configmap", "second", "-o", r"jsonpath={.data.warmroute\.yaml}"]);
    let config = || Config::parse(&text(), Path::new("warmroute.yaml")).expect("a config that is taken");
    assert_eq!(config().mode, Mode::Random);
    let upgrade = |values: &[&str]| {
        let set = values.iter().flat_map(|value| ["--set", value]);
        real.helm(&["upgrade", "second", &chart, "--reuse-values"].into_iter().chain(set).collect::<Vec<_>>())
    };
    upgrade(&["config.split.share=0.1", "config.split.by=workers"]);
    assert_eq!(
        (config().mode, config().split.share, config().split.by),
        (Mode::Random, 0.1, SplitBy::Workers)
    );
    upgrade(&["mode=kv", "config.split.share=0"]);
    assert_eq!((config().mode, config().split.share), (Mode::Kv, 0.0));
    let said = upgrade(&["replicas=2"]);
    assert!(said.contains("WARNING: there are several replicas and no hashKeySecret"), "{said}");
    let said = upgrade(&["replicas=2", "hashKeySecret=second-hash"]);
    assert!(!said.contains("WARNING") && text().contains("hash_key_file"), "{said}");
    let said = upgrade(&["replicas=1", "hashKeySecret=", "autoscaling.enabled=true"]);
    assert!(said.contains("WARNING"), "{said}");
    real.helm(&["uninstall", "second"]);
    let left = real.kubectl(&["get", "all,configmap,role,rolebinding", "-o", "name"]);
    assert!(!left.contains("second"), "{left}");
}
