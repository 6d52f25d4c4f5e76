//! What is in `deploy/`, put into a real API server: everything is taken, the router's rights are enough and no more, and a Service can be
//! taken over and given back as docs/migrate.md says.

use std::fs;

use serde_json::Value;

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

#[tokio::test]
async fn a_service_is_taken_over_and_given_back() {
    let cluster = Cluster::start("migrate").await;
    let Some(real) = cluster.real() else { return println!("{SKIPPED}") };
    real.kubectl(&["create", "service", "clusterip", "vllm", "--tcp=80:8000"]);
    let of = |path: &str| real.kubectl(&["get", "service", "vllm", "-o", &format!("jsonpath={{{path}}}")]);
    let (address, selector) = (of(".spec.clusterIP"), of(".spec.selector"));
    let guide =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/migrate.md")).expect("the guide");
    let quoted = |after: &str| {
        guide.split(after).nth(1).and_then(|rest| rest.split('\'').next()).expect("it is there")
    };
    // As the guide's shell puts it together.
    let back = real.folder().join("back.json");
    let template = guide
        .split("echo '")
        .nth(1)
        .and_then(|rest| rest.split("' > back.json").next())
        .expect("it is there");
    let ports = of(".spec.ports");
    fs::write(&back, template.replace("'$selector'", &selector).replace("'$ports'", &ports))
        .expect("room on the disk");
    let patch = quoted("--type=json -p '");
    real.kubectl(&["patch", "service", "vllm", "--type=json", "-p", patch]);
    assert_eq!(of(".spec.clusterIP"), address, "clients notice nothing");
    let taken: Value = serde_json::from_str(&of(".spec.selector")).expect("JSON");
    let pods =
        real.kubectl(&["get", "deployment", "warmroute", "-o", "jsonpath={.spec.template.metadata.labels}"]);
    assert_eq!(taken, serde_json::from_str::<Value>(&pods).expect("JSON"), "it selects the router's pods");
    assert_eq!(of(".spec.ports[0].targetPort"), "http");
    real.kubectl(&["patch", "service", "vllm", "--type=json", "--patch-file", &back.display().to_string()]);
    assert_eq!(
        (of(".spec.clusterIP"), of(".spec.selector"), of(".spec.ports[0].targetPort")),
        (address, selector, "8000".to_owned())
    );
}
