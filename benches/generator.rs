//! How fast the load generator itself is: one thread of it against a server that answers at once, with small requests. What
//! it reaches here is the ceiling of what it can measure elsewhere.
//!
//! `cargo bench --bench generator`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use indicatif::ProgressBar;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use warmroute::experiment::load::Load;
use warmroute::experiment::stats::Percentiles;
use warmroute::experiment::target::Target;

const REQUESTS: usize = 50_000;
const CONCURRENCY: usize = 16;

const EVENTS: &str = concat!(
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"length\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":6,\"completion_tokens\":1,",
    "\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n",
    "data: [DONE]\n\n"
);

/// Answers every request, the end of which it tells by the end of its JSON, with the same stream.
async fn answer(mut stream: TcpStream, response: Arc<[u8]>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        if buffer[..length].ends_with(b"}") && stream.write_all(&response).await.is_err() {
            return;
        }
    }
}

fn start_server() -> String {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(format!("http://{}", listener.local_addr().unwrap())).unwrap();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", EVENTS.len());
            let response: Arc<[u8]> = [head.as_bytes(), EVENTS.as_bytes()].concat().into();
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(answer(stream, Arc::clone(&response)));
            }
        });
    });
    told.recv().unwrap()
}

fn main() {
    let url = start_server();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let target = Target::resolve(&url).await.unwrap();
        let body =
            Bytes::from_static(br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#);
        for keep_alive in [false, true] {
            let load = Load {
                target: target.clone(),
                path: "/v1/chat/completions",
                concurrency: CONCURRENCY,
                keep_alive,
                timeout: Duration::from_secs(10),
                progress: ProgressBar::hidden(),
            };
            let body = body.clone();
            let finished =
                load.closed_loop(Arc::new(move |index| (index < REQUESTS).then(|| body.clone()))).await;
            let times =
                finished.outcomes.iter().map(|one| one.result.as_ref().unwrap().ttft.as_secs_f64() * 1e3);
            let ttft = Percentiles::of(times.collect()).unwrap();
            println!(
                "{}: {:.0} requests/s, TTFT p50 {:.3} ms, p99 {:.3} ms",
                if keep_alive { "kept connections" } else { "a connection each" },
                REQUESTS as f64 / finished.wall.as_secs_f64(),
                ttft.p50,
                ttft.p99
            );
        }
    });
}
