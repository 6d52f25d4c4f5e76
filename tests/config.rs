//! The config file: what is refused and how, what the defaults are, and edits while running.

use std::path::Path;
use std::sync::Arc;

use warmroute::app;
use warmroute::config::watch::Source;
use warmroute::config::{Config, Mode, Origin};
use warmroute::testing::{FakeEngine, TestRouter, until};

const WORKERS: &str = "workers: {static: [{url: http://w:8000}]}\n";

fn refusal(text: &str) -> String {
    Config::parse(text, Path::new("c.yaml")).expect_err(text).to_string()
}

#[test]
fn every_refusal_names_the_file_the_line_and_the_key() {
    for (text, place, words) in [
        ("listn: 0.0.0.0:1\n", "c.yaml:2: ", "unknown field `listn`"),
        (
            "timeouts:\n  conect: 1s\n",
            "c.yaml:3: timeouts: ",
            "unknown field `conect`, expected one of `connect`",
        ),
        ("timeouts:\n  connect: 0s\n", "c.yaml:3: timeouts.connect: ", "longer than zero"),
        (
            "timeouts:\n  client_head: 0s\n",
            "c.yaml:3: timeouts.client_head: ",
            "`off` switches this timer off",
        ),
        ("timeouts:\n  connect: -1s\n", "c.yaml:3: timeouts.connect: ", "`-1s` is not a duration"),
        ("timeouts:\n  connect: 5\n", "c.yaml:3: timeouts.connect: ", "write a number and a unit"),
        (
            "timeouts:\n  connect: [1s]\n",
            "c.yaml:3: timeouts.connect: ",
            "a list is here, where a single value should be",
        ),
        ("timeouts:\n  connect: 1s\n  connect: 2s\n", "c.yaml:3: timeouts: ", "duplicate"),
        (
            "timeouts: 5s\n",
            "c.yaml:2: timeouts: ",
            "text is here, where keys with values, as in `key: value`, should be",
        ),
        ("mode: sticky\n", "c.yaml:2: mode: ", "unknown variant `sticky`, expected `kv` or `random`"),
        ("random:\n  draw: pod\n", "c.yaml:3: random.draw: ", "expected `connection` or `request`"),
        ("listen: 0.0.0.0:99999\n", "c.yaml:2: listen: ", "port up to 65535"),
        ("listen: 8080\n", "c.yaml:2: listen: ", "`8080` is not an address to listen on"),
        ("limits:\n  body: 0\n", "c.yaml:3: limits.body: ", "more than zero"),
        ("limits:\n  body: much\n", "c.yaml:3: limits.body: ", "not a size"),
        ("limits:\n  bodies: 0\n", "c.yaml:3: limits.bodies: ", "more than zero"),
        ("drain:\n  announce: 10m\n", "c.yaml: drain.announce: ", "10m is more than drain.deadline, 5m"),
        ("limits:\n  bodies: 100MiB\n", "c.yaml: limits.bodies: ", "at least limits.body"),
        ("limits:\n  connections: -4\n", "c.yaml:3: limits.connections: ", "not a whole number"),
        ("cache:\n  bytes_per_token: 0\n", "c.yaml:3: cache.bytes_per_token: ", "above zero"),
        ("price:\n  queue_weight: -1\n", "c.yaml:3: price.queue_weight: ", "zero or more"),
        ("price:\n  queue_weight: .nan\n", "c.yaml:3: price.queue_weight: ", "zero or more"),
        ("retries:\n  ratio: 2000\n", "c.yaml:3: retries.ratio: ", "from 0 to 1000"),
        ("retries:\n  reserve: 2147483647\n", "c.yaml:3: retries.reserve: ", "from 0 to 1000000"),
        ("health:\n  path: health\n", "c.yaml:3: health.path: ", "begins with a slash"),
        ("admin_names: [warmroute.example, 'http://a']\n", "c.yaml:2: admin_names[1]: ", "not a host name"),
        ("admin_names: ['a:9090']\n", "c.yaml:2: admin_names[0]: ", "without scheme, port and path"),
        ("log:\n  level: loud=very\n", "c.yaml:3: log.level: ", "not a log level"),
        ("log:\n  level: 99\n", "c.yaml:3: log.level: ", "not a log level"),
        ("log:\n  traces: {to: 'http://me:secret@c:4318'}\n", "c.yaml:3: log.traces.to: ", "without user"),
        ("log:\n  traces: {to: 'http://c:99999'}\n", "c.yaml:3: log.traces.to: ", "65535"),
        ("log:\n  traces: {to: 'https://c:4318'}\n", "c.yaml:3: log.traces.to: ", "TLS"),
        ("shadow:\n  one_in: 3\n", "c.yaml:3: shadow.one_in: ", "a power of two"),
        ("explain:\n  keep: 2000\n", "c.yaml:3: explain.keep: ", "from 0 to 1024"),
        ("split:\n  share: 2\n", "c.yaml:3: split.share: ", "from 0 to 1"),
        ("split:\n  root_blocks: 0\n", "c.yaml:3: split.root_blocks: ", "more than zero"),
        ("log:\n  level: verbose\n", "c.yaml:3: log.level: ", "not a log level"),
        ("listen: \"0.0.0.0:1\n", "c.yaml:", "unexpected end of stream"),
    ] {
        let said = refusal(&format!("{WORKERS}{text}"));
        assert!(said.starts_with(place), "{text}: {said}");
        assert!(said.contains(words), "{text}: {said}");
        assert!(!said.contains(" at line "), "{said}");
    }
}

#[test]
fn workers_are_checked_one_by_one() {
    let said = |list: &str| refusal(&format!("workers:\n  static:\n{list}"));
    for (list, place, words) in [
        ("  - url: w:8000\n", "c.yaml:3: workers.static[0].url: ", "with its scheme"),
        ("  - url: http://w:8000/v1\n", "c.yaml:3: workers.static[0].url: ", "without a path"),
        ("  - url: http://w:0\n", "c.yaml:3: workers.static[0].url: ", "from 1 to 65535"),
        ("  - url: http://a\n  - url: http://w:99999\n", "c.yaml:4: workers.static[1].url: ", "65535"),
        (
            "  - url: http://w:8000\n  - url: HTTP://W:8000/\n",
            "c.yaml:3: workers.static: ",
            "http://w:8000 is in the list twice",
        ),
        (
            "  - url: http://w:8000\n    capacity_tokens: 0\n",
            "c.yaml:4: workers.static[0].capacity_tokens: ",
            "more than zero",
        ),
        ("  - capacity_tokens: 5\n", "c.yaml:3: workers.static[0]: ", "missing field `url`"),
        (
            "  - url: http://w:8000\n    weight: 1\n",
            "c.yaml:4: workers.static[0]: ",
            "unknown field `weight`",
        ),
        ("  # none\n    []\n", "c.yaml: workers: nobody is named", "at least one entry"),
    ] {
        let said = said(list);
        assert!(said.starts_with(place), "{list}: {said}");
        assert!(said.contains(words), "{list}: {said}");
    }
    for text in ["mode: kv\n", "workers: {}\n", "workers: {kubernetes: [], dns: []}\n"] {
        assert_eq!(
            refusal(text),
            "c.yaml: workers: nobody is named; a proxy needs at least one entry in workers.static, workers.kubernetes or \
             workers.dns"
        );
    }
    for text in ["", "\u{feff}", "# nothing\n\n  # here\n"] {
        assert!(refusal(text).starts_with("c.yaml: the file is empty"), "{}", refusal(text));
    }
}

#[test]
fn where_workers_are_found_is_checked_one_by_one() {
    for (list, place, words) in [
        ("kubernetes: [{}]", "c.yaml:1: workers.kubernetes: ", "name a `service`, or give a `selector`"),
        ("kubernetes: [{service: a, selector: b=c}]", "c.yaml:1: workers.kubernetes: ", "not both"),
        (
            "kubernetes: [{service: A_b}]",
            "c.yaml:1: workers.kubernetes[0].service: ",
            "not a name in Kubernetes",
        ),
        (
            "kubernetes: [{selector: a&watch=b}]",
            "c.yaml:1: workers.kubernetes[0].selector: ",
            "label selector",
        ),
        (
            "kubernetes: [{selector: 'a in ('}]",
            "c.yaml:1: workers.kubernetes[0].selector: ",
            "opens a parenthesis and does not close it",
        ),
        (
            "kubernetes: {service: a}",
            "c.yaml:1: workers.kubernetes: ",
            "keys with values is here, where a list should be",
        ),
        ("static: [a]", "c.yaml:1: workers.static[0]: ", "text is here, where keys with values"),
        (
            "kubernetes_api: [a]",
            "c.yaml:1: workers.kubernetes_api: ",
            "a list is here, where keys with values",
        ),
        ("tls: 5", "c.yaml:1: workers.tls: ", "a number is here, where keys with values"),
        ("zone_file: [a]", "c.yaml:1: workers.zone_file: ", "a list is here, where a single value should be"),
        (
            "kubernetes: [{service: a, namespace: b.c}]",
            "c.yaml:1: workers.kubernetes[0].namespace: ",
            "`b.c`",
        ),
        (
            "kubernetes: [{service: a, port: 70000}]",
            "c.yaml:1: workers.kubernetes[0].port: ",
            "from 1 to 65535",
        ),
        (
            "kubernetes: [{service: a, port: Web}]",
            "c.yaml:1: workers.kubernetes[0].port: ",
            "neither the name",
        ),
        (
            "kubernetes: [{service: a, scheme: tcp}]",
            "c.yaml:1: workers.kubernetes[0].scheme: ",
            "`http` or `https`",
        ),
        (
            "kubernetes: [{service: a}, {service: a}]",
            "c.yaml:1: workers.kubernetes: ",
            "kubernetes:a is in the list twice",
        ),
        (
            "kubernetes: [{service: a, weight: 1}]",
            "c.yaml:1: workers.kubernetes[0]: ",
            "unknown field `weight`",
        ),
        (
            "kubernetes_api: {url: kubernetes}",
            "c.yaml:1: workers.kubernetes_api.url: ",
            "address of an API server",
        ),
        ("kubernetes_api: {resync: 0s}", "c.yaml:1: workers.kubernetes_api.resync: ", "longer than zero"),
        ("dns: [{name: a.b}]", "c.yaml:1: workers.dns: ", "`port`: missing"),
        ("dns: [{srv: _http._tcp.a.b, port: 1}]", "c.yaml:1: workers.dns: ", "leave one out"),
        ("dns: [{}]", "c.yaml:1: workers.dns: ", "give a `name` with a `port`, or an `srv`"),
        ("dns: [{name: 'a b', port: 1}]", "c.yaml:1: workers.dns[0].name: ", "not a name in the DNS"),
        (
            "dns: [{name: a, port: 1, nameservers: [b]}]",
            "c.yaml:1: workers.dns[0].nameservers[0]: ",
            "socket address",
        ),
    ] {
        let said = refusal(&format!("workers: {{{list}}}\n"));
        assert!(said.starts_with(place), "{list}: {said}");
        assert!(said.contains(words), "{list}: {said}");
    }
    for (text, words) in [
        (
            "workers: []\n",
            "c.yaml:1: workers: a list is here, where keys with values, as in `key: value`, should be",
        ),
        ("workers: [\n", "c.yaml:1: workers: a list is here, where keys with values"),
        ("- workers\n", "c.yaml:1: the file: a list is here, where keys with values"),
    ] {
        let said = refusal(text);
        assert!(said.starts_with(words), "{text}: {said}");
    }
    let text = "workers: {kubernetes: [{service: a, port: http}, {selector: 'app=b,tier in (c,d)', namespace: e, port: 8000}], \
                dns: [{name: B.c., port: 8000}, {srv: _http._tcp.b, interval: 1s}]}";
    let config = Config::parse(text, Path::new("c.yaml")).unwrap();
    let shown = config.to_yaml();
    let again = Config::parse(&shown, Path::new("c.yaml")).unwrap_or_else(|error| panic!("{error}\n{shown}"));
    assert_eq!(again.workers.kubernetes, config.workers.kubernetes);
    assert_eq!(again.workers.dns, config.workers.dns);
}

#[tokio::test]
async fn an_api_server_that_cannot_be_asked_is_told_at_the_start() {
    let start = |api: &str, entry: &str| {
        let text = format!("workers: {{kubernetes: [{entry}], kubernetes_api: {api}}}");
        let mut config = Config::parse(&text, Path::new("c.yaml")).expect(&text);
        let here = TestRouter::config(Mode::Kv, &[]);
        (config.listen, config.admin) = (here.listen, here.admin);
        app::build(config).map(drop).map_err(|error| error.to_string())
    };
    let said =
        start("{url: 'https://127.0.0.1:1', ca: /nonexistent}", "{service: a, namespace: b}").unwrap_err();
    assert!(said.starts_with("workers.kubernetes: /nonexistent cannot be read"), "{said}");
    assert!(said.ends_with("see workers.kubernetes_api.ca"), "{said}");
    // In the clear, and as nobody.
    start("{url: 'http://127.0.0.1:1'}", "{service: a, namespace: b}").expect("nothing is missing");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let missing = Config::load(Path::new("/nonexistent/c.yaml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/c.yaml: cannot be read"), "{missing}");
    let key = refusal(&format!("{WORKERS}cache: {{hash_key_file: /nonexistent/key}}\n"));
    assert!(key.contains("cache.hash_key_file: /nonexistent/key cannot be read"), "{key}");
    let key = refusal("workers: {static: [{url: http://w:8000}], api_key_file: /dev/null}\n");
    assert!(key.contains("workers.api_key_file: /dev/null is empty"), "{key}");
    let two = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&two, "sk-one\nsk-two\n").unwrap();
    let path = two.path().display();
    let key = refusal(&format!("workers: {{static: [{{url: http://w:8000}}], api_key_file: {path}}}\n"));
    assert!(key.contains("workers.api_key_file: ") && key.contains("one line"), "{key}");
    assert!(!key.contains("sk-"), "{key}");
}

#[test]
fn two_listeners_in_one_place_are_refused() {
    for (listen, admin, refused) in [
        ("127.0.0.1:8080", "127.0.0.1:8080", true),
        ("0.0.0.0:8080", "127.0.0.1:8080", true),
        ("127.0.0.1:8080", "[::]:8080", true),
        ("0.0.0.0:8080", "[::1]:8080", false),
        ("127.0.0.1:8080", "127.0.0.2:8080", false),
        ("0.0.0.0:8080", "0.0.0.0:8081", false),
        ("0.0.0.0:0", "0.0.0.0:0", false),
    ] {
        let text = format!("{WORKERS}listen: '{listen}'\nadmin: '{admin}'\n");
        let said = Config::parse(&text, Path::new("c.yaml")).err().map(|error| error.to_string());
        assert_eq!(said.is_some(), refused, "{text}: {said:?}");
        if let Some(said) = said {
            assert!(
                said.starts_with(&format!("c.yaml: admin: {admin} is taken by listen: {listen}")),
                "{said}"
            );
        }
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_text() {
    let config = Config::parse(&format!("\u{feff}mode: random\n{WORKERS}"), Path::new("c.yaml")).unwrap();
    assert_eq!(config.mode, Mode::Random);
}

#[test]
fn secrets_are_in_no_dump() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "sk-very-secret\n").unwrap();
    let text = format!(
        "workers: {{static: [{{url: http://w:8000}}], api_key_file: {0}}}\ncache: {{hash_key_file: {0}}}\n",
        file.display()
    );
    let config = Config::parse(&text, Path::new("c.yaml")).unwrap();
    assert_eq!(config.workers.api_key.as_ref().unwrap().0, "sk-very-secret");
    assert!(config.hash_key.is_some());
    assert!(!config.to_yaml().contains("very-secret") && !format!("{config:?}").contains("very-secret"));
}

/// The keys of a YAML document, as paths.
fn keys(value: &serde_yaml::Value, at: &str, into: &mut Vec<String>) {
    if let Some(map) = value.as_mapping() {
        for (key, value) in map {
            let path = format!("{at}/{}", key.as_str().expect("keys are words"));
            into.push(path.clone());
            keys(value, &path, into);
        }
    }
}

#[test]
fn the_sample_file_shows_every_key_with_its_default() {
    let text = include_str!("../config/warmroute.yaml");
    let sample = Config::parse(text, Path::new("warmroute.yaml")).unwrap();
    let default = Config { workers: sample.workers.clone(), ..Config::default() };
    assert_eq!(sample.to_yaml(), default.to_yaml());

    let [mut shown, mut all] = [Vec::new(), Vec::new()];
    keys(&serde_yaml::from_str(text).unwrap(), "", &mut shown);
    keys(&serde_yaml::from_str(&default.to_yaml()).unwrap(), "", &mut all);
    for key in &all {
        assert!(shown.contains(key), "{key} is not in config/warmroute.yaml");
    }
}

#[test]
fn what_is_printed_can_be_read_again() {
    let text = format!(
        "{WORKERS}timeouts: {{client_head: off, connect: 1500ms}}\nlimits: {{body: 1000}}\nmode: random\n"
    );
    let config = Config::parse(&text, Path::new("c.yaml")).unwrap();
    assert_eq!(config.timeouts.client_head, None);
    let again = Config::parse(&config.to_yaml(), Path::new("again.yaml")).unwrap();
    assert_eq!(again.to_yaml(), config.to_yaml());
}

#[tokio::test]
async fn a_port_in_use_is_refused_by_its_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let engine = FakeEngine::start().await;
    let free = TestRouter::config(Mode::Kv, &[&engine]);
    let clients = Config { listen: address, ..free.clone() };
    let operator = Config { admin: address, ..free };
    for (config, key) in [(clients, "listen"), (operator, "admin")] {
        let error = app::build(config).err().expect("the port is taken").to_string();
        assert!(error.starts_with(&format!("{key}: cannot listen on {address}: ")), "{error}");
    }
}

#[tokio::test]
async fn edits_are_taken_up_and_bad_ones_keep_the_old_config() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("warmroute.yaml");
    let text = |mode: &str, engines: &[&FakeEngine]| {
        let urls: Vec<_> = engines.iter().map(|engine| format!("{{url: '{}'}}", engine.url())).collect();
        format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nmode: {mode}\nworkers: {{static: [{}]}}\n",
            urls.join(", ")
        )
    };
    std::fs::write(&file, text("kv", &[&one])).unwrap();
    let router = {
        let (config, source) = Source::load(file.clone()).unwrap();
        TestRouter::start_unready(config, Some(source)).await
    };
    let mode = || router.proxy.config.load().mode;
    let reloads = async |result: &str| {
        router.metric(&format!(r#"warmroute_config_reloads_total{{result="{result}"}}"#)).await
    };

    std::fs::write(&file, text("random", &[&one])).unwrap();
    until("an edit in place to be taken up", async || mode() == Mode::Random).await;

    std::fs::write(&file, "mode: kv\nworkers: {sta").unwrap();
    until("a broken file to be noticed", async || reloads("refused").await == 1.0).await;
    assert_eq!(mode(), Mode::Random);

    let renamed = folder.path().join("new.yaml");
    std::fs::write(&renamed, text("kv", &[&one, &two])).unwrap();
    std::fs::rename(&renamed, &file).unwrap();
    until("a rename to be taken up", async || mode() == Mode::Kv).await;
    until("the new worker to be usable", async || router.proxy.fleet.snapshot().eligible().len() == 2).await;

    std::fs::write(&file, text("kv", &[&two])).unwrap();
    until("the old worker to be gone", async || router.proxy.fleet.snapshot().workers.len() == 1).await;
    assert_eq!(router.client().await.get("/v1/models").await.status(), 200);
    assert_eq!((one.seen().len(), two.seen().len()), (0, 1));
    let page = router.admin("/metrics").await;
    assert!(!page.contains(&one.address().to_string()), "its series have gone with it");
}

#[tokio::test]
async fn an_edited_worker_keeps_its_health_its_counts_and_its_belief() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(4_000));
    assert_eq!(router.client().await.post("/v1/chat/completions", body).await.status(), 200);
    let (fleet, planner, clock) = (&router.proxy.fleet, &router.proxy.planner, router.proxy.clock);
    let before = fleet.snapshot().workers[0].clone();
    let belief = || planner.belief(before.id, clock.now()).expect("it is still there");
    let blocks = belief().blocks;
    assert!(blocks > 10);

    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    let edit = |config: &Config| router.proxy.reconfigure(config.clone(), None);
    config.workers.fixed[0].capacity_tokens = Some(50_000);
    config.workers.fixed[0].prefill_speed = Some(12_345.0);
    edit(&config);
    assert!(Arc::ptr_eq(&before, &fleet.snapshot().workers[0]));
    assert_eq!(fleet.snapshot().eligible(), [before.id], "its health is known");
    assert_eq!(belief().blocks, blocks);
    assert_eq!((belief().capacity_tokens, belief().prefill_speed), (Some(50_000), Some(12_345.0)));
    assert_eq!(before.metrics.requests.get(), 1);
    let series = format!(r#"warmroute_worker_requests_total{{worker="{}"}}"#, engine.address());
    assert_eq!(router.metric(&series).await, 1.0);

    config.workers.fixed[0].capacity_tokens = None;
    config.workers.fixed[0].prefill_speed = None;
    edit(&config);
    assert_eq!((belief().capacity_tokens, belief().prefill_speed), (None, None), "neither is known any more");
    assert_eq!(belief().blocks, blocks);
}

#[tokio::test]
async fn a_config_maps_swap_of_links_is_taken_up() {
    let engine = FakeEngine::start().await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (version, mode) in [("v1", "kv"), ("v2", "random")] {
        std::fs::create_dir(path(version)).unwrap();
        let text = format!(
            "mode: {mode}\nworkers: {{static: [{{url: '{}'}}]}}\nlisten: 127.0.0.1:0\nadmin: 127.0.0.1:0\n",
            engine.url()
        );
        std::fs::write(path(version).join("warmroute.yaml"), text).unwrap();
    }
    let link = |to: &Path, at: &Path| std::os::unix::fs::symlink(to, at);
    link(&path("v1"), &path("..data")).unwrap();
    link(Path::new("..data/warmroute.yaml"), &path("warmroute.yaml")).unwrap();
    let file = path("warmroute.yaml");
    let router = {
        let (config, source) = Source::load(file).unwrap();
        TestRouter::start_unready(config, Some(source)).await
    };
    link(&path("v2"), &path("..data_tmp")).unwrap();
    std::fs::rename(path("..data_tmp"), path("..data")).unwrap();
    until("the swap to be taken up", async || router.proxy.config.load().mode == Mode::Random).await;
}

#[test]
fn an_origin_is_what_workers_are_told_apart_by() {
    assert_eq!(Origin::parse("http://W:80").unwrap(), Origin::parse("http://w").unwrap());
}
