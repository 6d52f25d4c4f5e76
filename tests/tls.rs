//! TLS towards clients and towards workers, over real sockets.

mod certificates;

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use certificates::{Authority, Issued};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use warmroute::config::tls::provider;
use warmroute::config::{Config, Mode, Origin, Tls, WorkerTls};
use warmroute::testing::{FakeEngine, Step, TestRouter, soon, until};

const NAME: &str = "proxy.test";
const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: proxy.test\r\ncontent-length: 2\r\n\r\n{}";

fn pair(authority: &Authority, issued: &Issued) -> Tls {
    Tls {
        certificate: authority.file("tls.crt", &issued.certificate),
        key: authority.file("tls.key", &issued.key),
    }
}

async fn secure_router(authority: &Authority, engine: &FakeEngine) -> TestRouter {
    let config = TestRouter::config(Mode::Kv, &[engine]);
    TestRouter::start(Config { tls: Some(pair(authority, &authority.issue(&[NAME]))), ..config }).await
}

async fn connect(to: SocketAddr, authority: &Authority, protocol: &str) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("PEM"))
        .expect("an authority");
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let stream = TcpStream::connect(to).await?;
    let name = ServerName::try_from(NAME).expect("a name");
    soon("a handshake", TlsConnector::from(Arc::new(config)).connect(name, stream)).await
}

/// Speaks TLS before a worker that does not.
async fn front(issued: &Issued, engine: SocketAddr) -> SocketAddr {
    let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes()).expect("PEM")];
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).expect("PEM");
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a pair");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(stream).await else { return };
                let Ok(mut engine) = TcpStream::connect(engine).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut client, &mut engine).await;
            });
        }
    });
    address
}

/// A proxy before one worker that speaks TLS at `front`.
fn before_secure(front: SocketAddr, engine: &FakeEngine, tls: WorkerTls) -> Config {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    config.workers.fixed[0].url = Origin::parse(&format!("https://{front}")).expect("an address");
    config.workers.tls = tls;
    config.scrape.interval = None;
    config
}

#[tokio::test]
async fn clients_speak_http_1_and_2_in_tls() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let router = secure_router(&authority, &engine).await;

    let mut client = connect(router.clients, &authority, "http/1.1").await.expect("a good certificate");
    let request = "GET /v1/models HTTP/1.1\r\nhost: proxy.test\r\nconnection: close\r\n\r\n";
    client.write_all(request.as_bytes()).await.expect("open");
    let mut answer = String::new();
    soon("an answer", client.read_to_string(&mut answer)).await.expect("an end in good order");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");

    let stream = connect(router.clients, &authority, "h2").await.expect("a good certificate");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    tokio::spawn(connection);
    let request =
        http::Request::get("https://proxy.test/v1/models").body(Full::<Bytes>::default()).expect("one");
    let response = soon("an answer", client.send_request(request)).await.expect("an answer");
    assert_eq!(response.status(), 200);
    response.into_body().collect().await.expect("a whole body");

    for seen in engine.seen() {
        assert_eq!(seen.head.get("x-forwarded-proto"), Some("https"));
        assert_eq!(seen.head.get("x-forwarded-host"), Some("proxy.test"));
    }
    assert_eq!(engine.seen().len(), 2);
}

#[tokio::test]
async fn a_client_in_tls_that_leaves_is_missed_and_one_that_is_cut_knows() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let router = secure_router(&authority, &engine).await;
    engine.next(vec![Step::AwaitClose]);
    let mut client = connect(router.clients, &authority, "http/1.1").await.expect("a good certificate");
    client.write_all(format!("{CHAT}{CHAT}").as_bytes()).await.expect("open");
    engine.saw(1).await;
    drop(client);
    engine.abandoned(1).await;

    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    engine.next(vec![Step::send(head), Step::chunk("{"), Step::Reset]);
    let mut old = connect(router.clients, &authority, "http/1.1").await.expect("a good certificate");
    old.write_all(CHAT.replace("1.1", "1.0").as_bytes()).await.expect("open");
    let mut answer = Vec::new();
    soon("the end", old.read_to_end(&mut answer)).await.expect_err("a close would look like the end");
}

#[tokio::test]
async fn plain_http_on_the_tls_port_is_told_so() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let router = secure_router(&authority, &engine).await;
    let mut client = router.client().await;
    let answer = client.get("/v1/models").await;
    assert_eq!(answer.status(), 400);
    assert!(answer.text().contains(r#""code":"tls_required""#), "{}", answer.text());
    client.finish_sending().await;
    client.ended().await;
    assert!(engine.seen().is_empty());
}

#[tokio::test]
async fn a_handshake_that_stalls_is_given_up() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.tls = Some(pair(&authority, &authority.issue(&[NAME])));
    config.timeouts.client_head = Some(Duration::from_millis(100));
    let router = TestRouter::start(config).await;
    // A record that promises 512 bytes, and brings one.
    let mut half = router.client().await;
    half.send([22, 3, 1, 2, 0, 1]).await;
    let mut silent = router.client().await;
    for client in [&mut half, &mut silent] {
        client.ended().await;
    }
    until("both to be closed", async || router.metric("warmroute_client_connections").await == 0.0).await;
}

#[tokio::test]
async fn workers_are_reached_in_tls_by_their_authority() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let address = front(&authority.issue(&["127.0.0.1"]), engine.address()).await;
    let tls = WorkerTls { ca: Some(authority.file("ca.pem", authority.pem())), ..WorkerTls::default() };
    let router = TestRouter::start(before_secure(address, &engine, tls)).await;
    let mut client = router.client().await;
    for _ in 0..3 {
        assert_eq!(client.get("/v1/models").await.status(), 200);
    }
    assert_eq!(engine.connections(), 1, "connections are kept");
    assert_eq!(engine.seen()[0].head.get("host"), Some(address.to_string().as_str()));
    let series = format!(r#"warmroute_worker_requests_total{{worker="https://{address}"}}"#);
    assert_eq!(router.metric(&series).await, 3.0);
}

#[tokio::test]
async fn a_worker_in_tls_that_is_not_who_it_should_be_gets_nothing() {
    let (authority, other) = (Authority::new(), Authority::new());
    let engine = FakeEngine::start().await;
    let here = ["127.0.0.1"];
    let ca = || WorkerTls { ca: Some(authority.file("ca.pem", authority.pem())), ..WorkerTls::default() };
    let named = || WorkerTls { server_name: Some("vllm.internal".to_owned()), ..ca() };
    for (what, issued, tls, accepted) in [
        ("another authority", other.issue(&here), ca(), false),
        ("no public authority", authority.issue(&here), WorkerTls::default(), false),
        ("over", authority.issue_until(&here, 2001), ca(), false),
        ("another name", authority.issue(&["127.0.0.2"]), ca(), false),
        ("the name that is asked for", authority.issue(&["vllm.internal"]), named(), true),
        ("not the name that is asked for", authority.issue(&here), named(), false),
        (
            "anybody",
            other.issue_until(&["elsewhere"], 2001),
            WorkerTls { skip_verification: true, ..WorkerTls::default() },
            true,
        ),
    ] {
        let address = front(&issued, engine.address()).await;
        let mut config = before_secure(address, &engine, tls);
        config.health.interval = None;
        let before = engine.seen().len();
        let router = TestRouter::start(config).await;
        let answer = router.client().await.get("/v1/models").await;
        if accepted {
            assert_eq!(answer.status(), 200, "{what}: {}", answer.text());
            continue;
        }
        assert_eq!(answer.status(), 502, "{what}");
        assert!(
            answer.text().contains("bad_gateway") && !answer.text().contains("127.0"),
            "{}",
            answer.text()
        );
        assert_eq!(engine.seen().len(), before, "{what}: nothing of the request has reached it");
        let out = async || {
            router.client().await.get("/v1/models").await;
            router.admin("/fleet").await.contains(r#""state": "insecure""#)
        };
        until("the worker to be out", out).await;
    }
}

#[tokio::test]
async fn a_probe_does_not_pass_where_the_certificate_does_not() {
    let (authority, other) = (Authority::new(), Authority::new());
    let engine = FakeEngine::start().await;
    let address = front(&other.issue(&["127.0.0.1"]), engine.address()).await;
    let tls = WorkerTls { ca: Some(authority.file("ca.pem", authority.pem())), ..WorkerTls::default() };
    let mut config = before_secure(address, &engine, tls);
    config.health.interval = Some(Duration::from_millis(20));
    let router = TestRouter::start_unready(config, None).await;
    let failed = async || router.client().await.get("/v1/models").await.status() == 503;
    until("a neutral answer", failed).await;
    let told = format!(r#"warmroute_worker_state{{state="insecure",worker="https://{address}"}}"#);
    router.metric_is(&told, 1.0).await;
    assert_eq!(router.proxy.fleet.snapshot().eligible().len(), 0);
    assert!(engine.seen().is_empty());
}

#[tokio::test]
async fn other_authorities_of_the_workers_are_taken_up_and_bad_ones_are_not() {
    let (old, new) = (Authority::new(), Authority::new());
    let engine = FakeEngine::start().await;
    let address = front(&new.issue(&["127.0.0.1"]), engine.address()).await;
    let tls = WorkerTls { ca: Some(old.file("ca.pem", old.pem())), ..WorkerTls::default() };
    let mut config = before_secure(address, &engine, tls);
    config.health.interval = Some(Duration::from_millis(20));
    let router = TestRouter::start_unready(config, None).await;
    let state = |name| format!(r#"warmroute_worker_state{{state="{name}",worker="https://{address}"}}"#);
    router.metric_is(&state("insecure"), 1.0).await;
    assert_eq!(router.client().await.get("/v1/models").await.status(), 503);
    old.file("ca.pem", &(old.pem().to_owned() + new.pem()));
    router.metric_is(&state("up"), 1.0).await;
    let mut client = router.client().await;
    assert_eq!(client.get("/v1/models").await.status(), 200);
    // What cannot be used changes nothing: were it taken, no new connection would come about.
    old.file("ca.pem", "no certificate");
    let probes = engine.probes_passed();
    let now = probes.load(Ordering::SeqCst);
    until("many more probes", async || probes.load(Ordering::SeqCst) > now + 150).await;
    assert_eq!(router.metric(&state("up")).await, 1.0);
}

#[tokio::test]
async fn a_worker_that_does_not_speak_tls_is_a_502() {
    let engine = FakeEngine::start().await;
    let mut config = before_secure(engine.address(), &engine, WorkerTls::default());
    config.health.interval = None;
    let router = TestRouter::start(config).await;
    assert_eq!(router.client().await.get("/v1/models").await.status(), 502);
    assert!(engine.seen().is_empty());
}

#[tokio::test]
async fn a_certificate_that_cannot_be_used_is_refused_with_its_key() {
    let authority = Authority::new();
    let (one, two) = (authority.issue(&[NAME]), authority.issue(&[NAME]));
    let certificate = authority.file("one.crt", &one.certificate);
    let file = |name, text| authority.file(name, text).display().to_string();
    let [right, wrong] = [file("one.key", &one.key), file("two.key", &two.key)];
    let junk = file("junk", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
    let false_der = file("der", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let (empty, certificate) = (file("empty", ""), certificate.display().to_string());
    let tls = |certificate: &str, key: &str| format!("tls: {{certificate: {certificate}, key: {key}}}\n");
    let with = |text: &str, workers: &str| {
        let text = format!("{text}workers: {{static: [{{url: https://w:8000}}]{workers}}}\n");
        Config::parse(&text, Path::new("c.yaml")).map_err(|error| error.to_string())
    };
    assert!(with(&tls(&certificate, &right), "").is_ok());
    for (text, workers, starts, says) in [
        (tls("/nonexistent", &right), "", "tls.certificate: /nonexistent", "cannot be read"),
        (tls(&certificate, "/nonexistent"), "", "tls.key: /nonexistent", "cannot be read"),
        (tls(&empty, &right), "", "tls.certificate: ", "holds no certificate"),
        (tls(&junk, &right), "", "tls.certificate: ", "is not PEM"),
        (tls(&false_der, &right), "", "tls.certificate: ", "cannot be used"),
        (tls(&certificate, &certificate), "", "tls.key: ", "holds no private key"),
        (tls(&certificate, &wrong), "", "tls.key: ", "is not the key of tls.certificate"),
        (format!("tls: {{certificate: {certificate}}}\n"), "", "tls: missing field `key`", ""),
        (String::new(), ", tls: {ca: /nonexistent}", "workers.tls.ca: /nonexistent", "cannot be read"),
        (String::new(), &format!(", tls: {{ca: {right}}}"), "workers.tls.ca: ", "holds no certificate"),
        (String::new(), ", tls: {server_name: a..b}", "workers.tls.server_name: ", "`a..b` is not a name"),
        (
            String::new(),
            &format!(", tls: {{ca: {certificate}, skip_verification: true}}"),
            "workers.tls.skip_verification: ",
            "would mean nothing",
        ),
    ] {
        let said = with(&text, workers).expect_err(&text);
        let message = said
            .trim_start_matches("c.yaml:")
            .trim_start_matches(|c: char| c == ' ' || c == ':' || c.is_ascii_digit());
        assert!(message.starts_with(starts) && message.contains(says), "{text}{workers}: {said}");
        assert!(!said.contains("BEGIN"), "{said}");
    }
    // Nor does the proxy start with it.
    let mut config = TestRouter::config(Mode::Kv, &[]);
    config.tls = Some(Tls { certificate: certificate.into(), key: wrong.into() });
    let refused = warmroute::app::build(config).err().expect("they do not belong together").to_string();
    assert!(refused.starts_with("tls.key: "), "{refused}");
}

#[tokio::test]
async fn websockets_pass_in_tls_on_both_sides() {
    let (authority, engine) = (Authority::new(), FakeEngine::start().await);
    let address = front(&authority.issue(&["127.0.0.1"]), engine.address()).await;
    let tls = WorkerTls { ca: Some(authority.file("ca.pem", authority.pem())), ..WorkerTls::default() };
    let mut config = before_secure(address, &engine, tls);
    config.tls = Some(pair(&authority, &authority.issue(&[NAME])));
    let router = TestRouter::start(config).await;
    let switch = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    engine.next(vec![Step::send(switch), Step::Echo]);
    let mut client = connect(router.clients, &authority, "http/1.1").await.expect("a good certificate");
    let ask = "GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(ask.as_bytes()).await.expect("open");
    let mut got = Vec::new();
    soon("the switch", async {
        while !got.ends_with(b"\r\n\r\n") {
            got.push(client.read_u8().await.expect("open"));
        }
    })
    .await;
    assert!(got.starts_with(b"HTTP/1.1 101"));
    client.write_all(b"to and fro").await.expect("open");
    let mut echo = [0; 10];
    soon("the echo", client.read_exact(&mut echo)).await.expect("open");
    assert_eq!(&echo, b"to and fro");
}
