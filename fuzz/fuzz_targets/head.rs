//! Bytes of a client on a connection to the whole proxy: it neither panics nor hangs, all that it says are answers, and what
//! workers get is what the client has framed beyond doubt, in its order, and nothing else. The clock is paused: whoever waits for
//! more that never comes is at its time limit at once.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, Message, PLAIN_ANSWER, Step, TestRouter};
use warmroute_fuzz::http1;

struct Bench {
    runtime: Runtime,
    router: TestRouter,
    engine: FakeEngine,
}

/// What an HTTP/2 client says first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// More than every time limit together.
const FOR_EVER: Duration = Duration::from_secs(3_600);

fn bench() -> Bench {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let (router, engine) = runtime.block_on(async {
        let engine = FakeEngine::with(|message| match message.head.start.starts_with("HEAD ") {
            true => vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")],
            false => vec![Step::json("200 OK", PLAIN_ANSWER)],
        })
        .await;
        let mut config = TestRouter::config(Mode::Kv, &[&engine]);
        config.health.interval = None;
        config.scrape.interval = None;
        config.scrape.models_interval = None;
        config.timeouts.client_head = Some(Duration::from_millis(300));
        config.timeouts.client_body = Some(Duration::from_millis(300));
        config.limits.head = 8 << 10;
        (TestRouter::start(config).await, engine)
    });
    let bench = Bench { runtime, router, engine };
    // Where nothing reaches a worker, nothing is shown.
    let plain = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}";
    let (answers, broken) = bench.runtime.block_on(converse(&bench, &plain.repeat(2), 9));
    assert_eq!((bench.engine.seen().len(), broken), (2, false));
    assert_eq!(http1::check_answers(&answers, &[b"POST", b"POST"], false), Ok(2));
    bench.engine.forget_seen();
    bench
}

thread_local! {
    static BENCH: Bench = bench();
}

/// Sends `bytes` in pieces; answers with all that came back, and whether the connection was broken off.
async fn converse(bench: &Bench, bytes: &[u8], piece: usize) -> (Vec<u8>, bool) {
    let mut stream = TcpStream::connect(bench.router.clients).await.expect("the proxy takes connections");
    stream.set_nodelay(true).expect("an option of the socket");
    let mut broken = false;
    for piece in bytes.chunks(piece.max(bytes.len() / 16 + 1)) {
        broken |= stream.write_all(piece).await.is_err();
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
    }
    let mut answers = Vec::new();
    broken |= stream.read_to_end(&mut answers).await.is_err();
    (answers, broken)
}

/// What a worker got has one framing and says what `asked` says.
fn is_same(got: &Message, asked: &http1::Asked) -> bool {
    let heard = http1::requests(&got.raw);
    let [read] = &heard.requests[..] else { panic!("a worker got what is no one request: {got:?}") };
    assert!(got.head.get("transfer-encoding").is_none() && got.head.all("content-length").len() <= 1);
    assert_eq!((&read.body, heard.unfinished), (&got.body, None));
    let path = asked.target.starts_with(b"/") && !asked.target.contains(&b'#');
    read.method == asked.method && read.body == asked.body && (!path || read.target == asked.target)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    BENCH.with(|bench| {
        let (answers, broken) = bench.runtime.block_on(async {
            let all = tokio::time::timeout(FOR_EVER, converse(bench, bytes, usize::from(piece) + 1)).await;
            // The clock goes on only when nobody has anything left to do.
            tokio::time::sleep(Duration::from_millis(1)).await;
            all.expect("the proxy never lets go of the connection")
        });
        let got = bench.engine.seen();
        bench.engine.forget_seen();
        if bytes.starts_with(PREFACE) {
            return;
        }
        let heard = http1::requests(bytes);
        let mut asked = heard.requests.iter();
        for got in &got {
            assert!(asked.any(|asked| is_same(got, asked)), "nobody asked for {got:?}, but {heard:?}");
        }
        let methods = heard.requests.iter().map(|asked| &asked.method).chain(&heard.unfinished);
        let methods: Vec<&[u8]> = methods.map(Vec::as_slice).collect();
        if let Err(what) = http1::check_answers(&answers, &methods, broken) {
            panic!("{what}: {:?}", String::from_utf8_lossy(&answers));
        }
    });
});
