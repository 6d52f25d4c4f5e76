//! What an operator turns: draining a worker, and who may turn anything; through the admin listener and the commands.

use std::process::{Command, Output};

use warmroute::config::{Config, Mode};
use warmroute::testing::{Answer, FakeEngine, Gate, Step, TestRouter, Wire, until};

async fn ask(router: &TestRouter, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    let mut admin = Wire::connect(router.admin).await;
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: a\r\n{headers}content-length: {length}\r\n\r\n");
    admin.send(format!("{head}{body}")).await;
    admin.answer(method).await.expect("an answer")
}

async fn drain(router: &TestRouter, engine: &FakeEngine, verb: &str) -> Answer {
    ask(router, "POST", &format!("/workers/{}/{verb}", engine.address()), "", "").await
}

async fn pair(mode: Mode) -> (FakeEngine, FakeEngine, TestRouter) {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let router = TestRouter::before(mode, &[&one, &two]).await;
    (one, two, router)
}

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_drained_worker_ends_what_it_has_and_gets_nothing_new_in_either_mode() {
    for mode in [Mode::Kv, Mode::Random] {
        let (one, two, router) = pair(mode).await;
        drain(&router, &two, "drain").await;
        let gate = Gate::default();
        one.next(vec![Step::stream_head(), Step::Await(gate.clone()), Step::last_chunk()]);
        let mut under_way = router.client().await;
        under_way.send(message(r#"{"prompt":"x","stream":true}"#)).await;
        let (head, raw) = under_way.head().await.expect("a head");
        drain(&router, &two, "resume").await;
        let told = drain(&router, &one, "drain").await;
        assert_eq!(told.status(), 200);
        assert!(
            told.text().contains(r#""state": "draining""#) && told.text().contains(r#""usable": 1"#),
            "{}",
            told.text()
        );
        assert_eq!(router.metric(&state(&one, "draining")).await, 1.0);
        assert_eq!(router.metric(&state(&one, "up")).await, 0.0);
        let before = one.seen().len();
        assert_eq!(before, 1);
        for _ in 0..20 {
            assert_eq!(router.client().await.post(PATH, r#"{"prompt":"x"}"#).await.status(), 200);
        }
        assert_eq!(one.seen().len(), before);
        assert!(two.seen().len() >= 20);
        gate.open();
        assert_eq!(under_way.body(head, raw, "POST").await.status(), 200, "what ran goes on to its end");
        // Another edit of the config leaves it drained.
        let mut edited = Config::clone(&router.proxy.config.load());
        edited.workers.fixed[0].capacity_tokens = Some(123_456);
        router.proxy.reconfigure(edited, None);
        assert_eq!(router.metric(&state(&one, "draining")).await, 1.0);
        drain(&router, &one, "resume").await;
        assert_eq!(router.metric(&state(&one, "draining")).await, 0.0);
        until("the first worker to be asked again", async || {
            router.client().await.post(PATH, r#"{"prompt":"x"}"#).await;
            one.seen().len() > before
        })
        .await;
    }
}

#[tokio::test]
async fn with_every_worker_drained_there_is_nobody_to_ask() {
    let (one, two, router) = pair(Mode::Kv).await;
    drain(&router, &one, "drain").await;
    drain(&router, &two, "drain").await;
    assert_eq!(router.client().await.post(PATH, r#"{"prompt":"x"}"#).await.status(), 503);
    assert!(router.admin("/readyz").await.contains("none of 2 workers usable"));
}

#[tokio::test]
async fn a_name_that_nobody_has_is_told_with_those_that_there_are() {
    let (one, two, router) = pair(Mode::Kv).await;
    let answer = ask(&router, "POST", "/workers/10.9.9.9:1/drain", "", "").await;
    assert_eq!(answer.status(), 404);
    let names = format!("no worker is called 10.9.9.9:1; there are: {} {}\n", one.address(), two.address());
    assert_eq!(answer.text(), names);
    assert_eq!(ask(&router, "POST", &format!("/workers/{}/stop", one.address()), "", "").await.status(), 404);
    assert_eq!(ask(&router, "GET", &format!("/workers/{}/drain", one.address()), "", "").await.status(), 405);
}

#[tokio::test]
async fn a_page_of_another_site_turns_nothing() {
    let (one, _two, router) = pair(Mode::Kv).await;
    for headers in ["sec-fetch-site: cross-site\r\n", "origin: http://evil.example\r\n", "origin: null\r\n"] {
        assert_eq!(ask(&router, "PUT", "/mode", headers, "random").await.status(), 403, "{headers}");
        let path = format!("/workers/{}/drain", one.address());
        assert_eq!(ask(&router, "POST", &path, headers, "").await.status(), 403, "{headers}");
    }
    assert!(router.admin("/mode").await.contains("kv"));
    for headers in ["sec-fetch-site: same-origin\r\norigin: http://a\r\n", "origin: http://a\r\n", ""] {
        assert_eq!(ask(&router, "PUT", "/mode", headers, "random").await.status(), 200, "{headers}");
    }
}

/// Whoever owns a name can point it here once their page is loaded: to a browser this listener is then that page's own.
#[tokio::test]
async fn a_page_whose_name_was_pointed_here_turns_nothing() {
    let (_one, _two, router) = pair(Mode::Kv).await;
    let put = async |host: &str, headers: &str| {
        let mut admin = Wire::connect(router.admin).await;
        let head = format!("PUT /mode HTTP/1.1\r\nhost: {host}\r\n{headers}content-length: 6\r\n\r\nrandom");
        admin.send(head).await;
        admin.answer("PUT").await.expect("an answer")
    };
    let page = "origin: http://Board.example:9090\r\n";
    let refused = put("board.example:9090", page).await;
    assert_eq!(refused.status(), 403);
    assert!(refused.text().contains("admin_names"), "{}", refused.text());
    assert!(router.admin("/mode").await.contains("kv"));
    assert_eq!(put("board.example:9090", "").await.status(), 200, "a program may call it so");
    let mut named = Config::clone(&router.proxy.config.load());
    named.admin_names = vec!["board.example".to_owned()];
    router.proxy.reconfigure(named, None);
    assert_eq!(put("board.example:9090", page).await.status(), 200);
}

#[tokio::test]
async fn names_may_be_encoded() {
    let (one, _two, router) = pair(Mode::Kv).await;
    let encoded = one.address().to_string().replace(':', "%3A").replace('.', "%2e");
    let drained = ask(&router, "POST", &format!("/workers/{encoded}/drain"), "", "").await;
    assert_eq!(drained.status(), 200, "{}", drained.text());
    let url = one.url().replace('/', "%2f");
    assert_eq!(ask(&router, "POST", &format!("/workers/{url}/resume"), "", "").await.status(), 200);
    assert_eq!(ask(&router, "POST", "/workers/%ff/drain", "", "").await.status(), 400);
    for name in ["a b", "a/drain?x#y", "ü", "a\nb"] {
        let (done, _, complaint) = warmroute(&router, &["workers", "drain", name]).await;
        let said = format!("no worker is called {}; there are: ", name.escape_debug());
        assert!(!done && complaint.contains(&said), "{complaint}");
    }
    let (done, told, _) = warmroute(&router, &["workers", "drain", &one.url()]).await;
    assert!(done, "{told}");
}

#[tokio::test]
async fn an_address_that_is_none_is_refused_by_name() {
    for (url, complaint) in [
        ("http://127.0.0.1:99999", "--admin: `http://127.0.0.1:99999`: the port is a number from 1 to 65535"),
        ("https://127.0.0.1:1", "only http://"),
        ("http://127.0.0.1:1,http://127.0.0.1:2", "one address"),
    ] {
        for command in [&["status"][..], &["mode"], &["explain", "/dev/null"], &["workers", "drain", "a"]] {
            let output = run(url.to_owned(), command).await;
            let said = String::from_utf8(output.stderr).expect("text");
            assert!(!output.status.success() && said.contains(complaint), "{command:?}: {said}");
        }
    }
}

/// Runs the program apart from the runtime, which has its requests to answer.
async fn run(admin: String, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(arguments).args(["--admin", &admin]);
    let run = tokio::task::spawn_blocking(move || command.output());
    run.await.expect("no panic").expect("the program runs")
}

#[tokio::test]
async fn what_can_be_read_has_a_head_and_other_methods_are_told_which_there_are() {
    let (_one, _two, router) = pair(Mode::Kv).await;
    for (path, allowed) in [
        ("/", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/fleet", "GET, HEAD"),
        ("/series", "GET, HEAD"),
        ("/config", "GET, HEAD"),
        ("/decisions", "GET, HEAD"),
        ("/prefixes", "GET, HEAD"),
        ("/mode", "GET, HEAD, PUT"),
    ] {
        let head = ask(&router, "HEAD", path, "", "").await;
        assert_eq!((head.status(), head.body.len()), (200, 0), "{path}");
        let refused = ask(&router, "DELETE", path, "", "").await;
        assert_eq!((refused.status(), refused.head.get("allow")), (405, Some(allowed)), "{path}");
    }
    for path in ["/explain", "/workers/a:1/drain"] {
        let refused = ask(&router, "GET", path, "", "").await;
        assert_eq!((refused.status(), refused.head.get("allow")), (405, Some("POST")), "{path}");
    }
    assert_eq!(ask(&router, "GET", "/nothing", "", "").await.status(), 404);
}

/// Nothing of the page comes from elsewhere, and a browser is told to fetch nothing from there.
#[tokio::test]
async fn the_status_page_is_whole_and_closed() {
    let (_one, _two, router) = pair(Mode::Kv).await;
    let page = ask(&router, "GET", "/", "", "").await;
    let policy = page.head.get("content-security-policy").expect("a policy").to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let text = page.text();
    assert!(
        text.contains("<title>warmroute</title>") && !text.contains("style=") && !text.contains("onclick")
    );
    for (asset, kind) in
        [("status.css", "text/css"), ("status.js", "text/javascript"), ("status.svg", "image/svg+xml")]
    {
        assert!(text.contains(&format!(r#""{asset}""#)), "{asset}");
        let file = ask(&router, "GET", &format!("/{asset}"), "", "").await;
        assert!(file.head.get("content-type").expect("a type").starts_with(kind));
        let elsewhere = file.text().replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{asset}");
    }
    assert_eq!(ask(&router, "POST", "/", "", "").await.status(), 405);
}

#[tokio::test]
async fn the_series_go_on_from_the_sample_that_is_known() {
    let (_one, _two, router) = pair(Mode::Kv).await;
    until("a first sample", async || router.admin("/series").await.contains(r#""seq": 1"#)).await;
    let told = router.admin("/series?since=1").await;
    assert!(!told.contains(r#""seq": 1,"#) && told.contains(r#""next": "#), "{told}");
    assert!(router.admin("/series").await.contains(r#""ideal": "#));
    assert!(told.contains(r#""bounds": "#) && told.contains(r#""in_flight": 0"#), "{told}");
    assert_eq!(ask(&router, "GET", "/series?since=x", "", "").await.status(), 400);
}

async fn warmroute(router: &TestRouter, arguments: &[&str]) -> (bool, String, String) {
    let output = run(format!("http://{}", router.admin), arguments).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn the_commands_show_switch_and_drain() {
    let (one, two, router) = pair(Mode::Kv).await;
    let (address, other) = (one.address().to_string(), two.address().to_string());
    let (done, shown, _) = warmroute(&router, &["status"]).await;
    assert!(done && shown.starts_with("mode kv, 2 of 2 workers usable, 0 requests in flight"), "{shown}");
    assert!(shown.contains(&address) && shown.contains(&other), "{shown}");

    assert_eq!(warmroute(&router, &["mode"]).await, (true, "kv\n".to_owned(), String::new()));
    assert_eq!(warmroute(&router, &["mode", "random"]).await.1, "random\n");
    assert!(router.admin("/mode").await.contains("random"));

    let (done, told, _) = warmroute(&router, &["workers", "drain", &address, "--wait"]).await;
    assert!(done, "{told}");
    assert_eq!(told, format!("{address} drains: 0 requests there; 1 usable worker\n"));
    assert!(warmroute(&router, &["status"]).await.1.contains("draining"));
    let (_, told, _) = warmroute(&router, &["workers", "resume", &address]).await;
    assert_eq!(told, format!("{address} is given requests again; 2 usable workers\n"));

    let (done, _, complaint) = warmroute(&router, &["workers", "drain", "nobody"]).await;
    assert!(!done && complaint.contains("no worker is called nobody; there are: "), "{complaint}");
}

#[tokio::test]
async fn draining_can_wait_for_the_last_request() {
    let (one, two, router) = pair(Mode::Kv).await;
    drain(&router, &two, "drain").await;
    let gate = Gate::default();
    one.next(vec![Step::stream_head(), Step::Await(gate.clone()), Step::last_chunk()]);
    let mut client = router.client().await;
    client.send(message(r#"{"prompt":"x","stream":true}"#)).await;
    client.head().await.expect("a head");
    let address = one.address().to_string();
    let waiting = tokio::spawn({
        let admin = format!("http://{}", router.admin);
        async move { run(admin, &["workers", "drain", &address, "--wait"]).await }
    });
    router.metric_is(&state(&one, "draining"), 1.0).await;
    assert!(!waiting.is_finished());
    gate.open();
    let output = waiting.await.expect("it ends");
    let told = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && told.ends_with("is drained\n"), "{told}");
}

#[tokio::test]
async fn an_address_that_is_no_admin_listener_is_told() {
    let engine = FakeEngine::start().await;
    let output = run(engine.url(), &["status"]).await;
    let complaint = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success() && complaint.contains("/fleet"), "{complaint}");
}

fn state(engine: &FakeEngine, name: &str) -> String {
    format!(r#"warmroute_worker_state{{state="{name}",worker="{}"}}"#, engine.address())
}

fn message(body: &str) -> String {
    format!("POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}
