//! The files in `deploy/`: every field is one that Kubernetes knows and of its type, what belongs together agrees, and the config in the
//! ConfigMap is one that the program takes. `deploy/check` holds the chart against them, and `tests/kubernetes` puts them into a real API
//! server.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};
use serde_json::Value;
use warmroute::config::{Config, Mode, Slices};

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

fn documents(file: &str) -> Vec<Value> {
    let text = fs::read_to_string(deploy().join(file)).expect(file);
    let documents =
        serde_yaml::Deserializer::from_str(&text).map(|document| Value::deserialize(document).expect(file));
    documents.filter(|document| !document.is_null()).collect()
}

/// What a type makes of a document, as it would write it itself.
fn typed<T: DeserializeOwned + Serialize>(document: &Value) -> Value {
    let object: T = serde_json::from_value(document.clone())
        .unwrap_or_else(|error| panic!("{}: {error}", document["metadata"]["name"]));
    serde_json::to_value(object).expect("JSON")
}

/// Every field of `written` that `known` does not have: misspelt, or in the wrong place.
fn unknown(path: &str, written: &Value, known: &Value, found: &mut Vec<String>) {
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            for (key, value) in written {
                match known.get(key) {
                    Some(known) => unknown(&format!("{path}.{key}"), value, known, found),
                    None => found.push(format!("{path}.{key}")),
                }
            }
        }
        (Value::Array(written), Value::Array(known)) => {
            for (at, (written, known)) in written.iter().zip(known).enumerate() {
                unknown(&format!("{path}[{at}]"), written, known, found);
            }
        }
        (written, known) if written != known => found.push(format!("{path}: {written} is read as {known}")),
        _ => {}
    }
}

#[test]
fn every_field_is_one_that_kubernetes_knows() {
    let mut seen = 0;
    for file in ["warmroute.yaml", "autoscaling/autoscaling.yaml", "vllm.yaml"] {
        for document in documents(file) {
            let kind = document["kind"].as_str().expect("a kind");
            let known = match (document["apiVersion"].as_str().expect("a version"), kind) {
                ("v1", "ConfigMap") => typed::<ConfigMap>(&document),
                ("v1", "Service") => typed::<Service>(&document),
                ("v1", "ServiceAccount") => typed::<ServiceAccount>(&document),
                ("apps/v1", "Deployment") => typed::<Deployment>(&document),
                ("rbac.authorization.k8s.io/v1", "Role") => typed::<Role>(&document),
                ("rbac.authorization.k8s.io/v1", "RoleBinding") => typed::<RoleBinding>(&document),
                ("networking.k8s.io/v1", "NetworkPolicy") => typed::<NetworkPolicy>(&document),
                ("policy/v1", "PodDisruptionBudget") => typed::<PodDisruptionBudget>(&document),
                ("autoscaling/v2", "HorizontalPodAutoscaler") => typed::<HorizontalPodAutoscaler>(&document),
                (version, kind) => panic!("{file}: {version} {kind} is checked by nobody"),
            };
            let mut found = Vec::new();
            unknown(kind, &document, &known, &mut found);
            assert!(found.is_empty(), "{file}: {found:#?}");
            seen += 1;
        }
    }
    assert!(seen >= 10, "{seen} documents");
}

#[test]
fn a_misspelt_field_is_found() {
    let mut service =
        documents("warmroute.yaml").into_iter().find(|d| d["kind"] == "Service").expect("a Service");
    service["spec"]["ports"][0]["targtPort"] = "http".into();
    let mut found = Vec::new();
    unknown("Service", &service, &typed::<Service>(&service), &mut found);
    assert_eq!(found, ["Service.spec.ports[0].targtPort"]);
}

fn of_kind(kind: &str) -> Value {
    documents("warmroute.yaml").into_iter().find(|document| document["kind"] == kind).expect("it is there")
}

#[test]
fn the_config_is_taken_and_fits_the_deployment() {
    let map = of_kind("ConfigMap");
    let text = map["data"]["warmroute.yaml"].as_str().expect("the config");
    let config = Config::parse(text, Path::new("warmroute.yaml")).expect("a config that is taken");
    assert_eq!(config.mode, Mode::Kv);
    let deployment = of_kind("Deployment");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let port = |name: &str| {
        let ports = container["ports"].as_array().expect("ports");
        ports.iter().find(|port| port["name"] == name).expect("the port")["containerPort"].as_u64()
    };
    assert_eq!(port("http"), Some(u64::from(config.listen.port())));
    assert_eq!(port("admin"), Some(u64::from(config.admin.port())));
    // What runs may end before it is killed: the sleep before the signal, the drain, and some seconds.
    let grace = pod["terminationGracePeriodSeconds"].as_u64().expect("seconds");
    let sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().expect("seconds");
    assert!(grace > sleep + config.drain.deadline.as_secs(), "{grace}");
    // The bodies that may be held are no more than half of the memory.
    assert_eq!(container["resources"]["limits"]["memory"], "1Gi");
    assert!(config.limits.bodies <= (1 << 30) / 2);
    // The config is followed for edits, which a `subPath` would hide.
    let mounts = container["volumeMounts"].as_array().expect("mounts");
    assert!(mounts.iter().all(|mount| mount.get("subPath").is_none()), "{mounts:?}");
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["capabilities"]["drop"][0], "ALL");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
}

#[test]
fn the_example_is_the_service_that_the_config_follows() {
    let config = of_kind("ConfigMap")["data"]["warmroute.yaml"].as_str().expect("the config").to_owned();
    let config = Config::parse(&config, Path::new("warmroute.yaml")).expect("a config");
    let service = documents("vllm.yaml").into_iter().find(|d| d["kind"] == "Service").expect("a Service");
    let followed = &config.workers.kubernetes[0].of;
    assert_eq!(*followed, Slices::Service(service["metadata"]["name"].as_str().expect("a name").to_owned()));
}

/// The keys of a mapping.
fn keys(of: &Value) -> BTreeSet<&str> {
    of.as_object().expect("a mapping").keys().map(String::as_str).collect()
}

#[test]
fn the_chart_knows_the_keys_of_the_config() {
    let schema = fs::read_to_string(deploy().join("helm/warmroute/values.schema.json")).expect("the schema");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/warmroute.yaml");
    let all: Value = serde_yaml::from_str(&fs::read_to_string(all).expect("all keys")).expect("YAML");
    let known = &schema["properties"]["config"]["properties"];
    assert_eq!(keys(known), keys(&all));
    for section in ["workers", "split"] {
        assert_eq!(keys(&known[section]["properties"]), keys(&all[section]), "{section}");
    }
    // Each key of an entry, as the program writes them.
    let text = "workers: {kubernetes: [{service: a}, {selector: b}]}";
    let config = Config::parse(text, Path::new("c.yaml")).expect("entries");
    let written = serde_json::to_value(&config.workers.kubernetes).expect("JSON");
    let entry = &schema["definitions"]["kubernetes"]["items"]["properties"];
    let both = keys(&written[0]).union(&keys(&written[1])).copied().collect();
    assert_eq!(keys(entry), both);
}

#[test]
fn the_router_may_read_endpoint_slices_and_nothing_else() {
    let rules = of_kind("Role")["rules"].clone();
    let all = serde_json::json!([
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]);
    assert_eq!(rules, all);
    let documents = documents("warmroute.yaml");
    assert!(documents.iter().all(|document| document["kind"] != "ClusterRole"));
}

const OLD: &str = "deploy/monitoring/monitoring.yaml is not of this time: run deploy/generate";

#[test]
fn the_monitoring_finds_the_admin_service_and_has_the_tested_rules_and_board() {
    let monitoring = documents("monitoring/monitoring.yaml");
    let of_kind =
        |kind: &str| monitoring.iter().find(|document| document["kind"] == kind).expect("it is there");
    let monitor = of_kind("ServiceMonitor");
    let selected = monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels");
    let is_selected =
        |service: &&Value| selected.iter().all(|(name, value)| service["metadata"]["labels"][name] == *value);
    let documents = documents("warmroute.yaml");
    let services: Vec<&Value> =
        documents.iter().filter(|d| d["kind"] == "Service").filter(is_selected).collect();
    let [service] = services.as_slice() else { panic!("one Service is to be read: {services:?}") };
    assert_eq!(service["spec"]["ports"][0]["name"], monitor["spec"]["endpoints"][0]["port"]);
    let rules: Value =
        serde_yaml::from_str(&fs::read_to_string(deploy().join("prometheus/rules.yaml")).expect("rules"))
            .expect("YAML");
    assert_eq!(of_kind("PrometheusRule")["spec"], rules, "{OLD}");
    let board = of_kind("ConfigMap")["data"]["warmroute.json"].as_str().expect("the board");
    let original = fs::read_to_string(deploy().join("grafana/warmroute.json")).expect("the board");
    assert!(board.trim_end() == original.trim_end(), "{OLD}");
}
