//! A redis-server of a test's own, and what several tests ask of routers that share over it.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use warmroute::config::{Config, Sharing, StoreUrl};
use warmroute::core::blocks::HashKey;
use warmroute::engine::http::{EngineConfig, Fleet, Running};
use warmroute::engine::model::Spec;
use warmroute::testing::{TestRouter, chat, until};

/// A redis-server of the test's own, that keeps nothing and wants a password.
pub struct Redis {
    pub directory: tempfile::TempDir,
    pub port: u16,
    child: Option<Child>,
}

impl Redis {
    /// `None` where there is none to be had.
    pub async fn start() -> Option<Redis> {
        let mut redis = Redis::new()?;
        redis.begin().await;
        Some(redis)
    }

    pub fn new() -> Option<Redis> {
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("left out: redis-server is not installed");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("password"), PASSWORD).unwrap();
        Some(Redis { directory, port, child: None })
    }

    pub async fn begin(&mut self) {
        let port = self.port.to_string();
        self.begin_with(&["--port", &port, "--save", "", "--appendonly", "no", "--requirepass", PASSWORD])
            .await;
    }

    pub async fn begin_with(&mut self, options: &[&str]) {
        let mut command = Command::new("redis-server");
        command.args(options).args(["--bind", "127.0.0.1"]).arg("--dir").arg(self.directory.path());
        self.child = Some(command.stdout(Stdio::null()).stdin(Stdio::null()).spawn().unwrap());
        let port = self.port;
        let listens = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
        until("the store to listen", listens).await;
    }

    /// Has the server do something, a command in each line; answers what it said.
    pub async fn tell(&self, lines: &str) -> String {
        let lines: Vec<Vec<&[u8]>> =
            lines.lines().map(|line| line.split(' ').map(str::as_bytes).collect()).collect();
        self.ask(&lines).await
    }

    /// The same of commands whose words are any bytes.
    pub async fn ask(&self, commands: &[Vec<&[u8]>]) -> String {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let (enter, leave) = (vec![b"AUTH".as_slice(), PASSWORD.as_bytes()], vec![b"QUIT".as_slice()]);
        let mut bytes = Vec::new();
        for words in [&[enter], commands, &[leave]].concat() {
            bytes.extend(format!("*{}\r\n", words.len()).bytes());
            for word in words {
                bytes.extend(format!("${}\r\n", word.len()).bytes());
                bytes.extend([word, b"\r\n"].concat());
            }
        }
        stream.write_all(&bytes).await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        said
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn password_file(&self) -> PathBuf {
        self.directory.path().join("password")
    }

    pub fn shared(&self, config: Config) -> Config {
        shared(self.port, Some(self.password_file()), config)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

pub const PASSWORD: &str = "open sesame";

/// The config of a router that shares over the store on that port.
pub fn shared(port: u16, password_file: Option<PathBuf>, mut config: Config) -> Config {
    config.hash_key = Some(HashKey([7; 32]));
    config.scrape.interval = Some(Duration::from_millis(50));
    let urls = vec![StoreUrl::parse(&format!("redis://127.0.0.1:{port}")).unwrap()];
    config.sharing = Some(Sharing { urls, password_file, ..Sharing::default() });
    config
}

/// A thousand times as fast as life, with room for all that is asked for.
pub fn engine() -> EngineConfig {
    EngineConfig {
        enable_prompt_tokens_details: true,
        time_scale: 1000.0,
        engine: Spec { num_blocks: 20_000, ..Spec::default() },
        ..EngineConfig::default()
    }
}

pub async fn workers(count: usize) -> Running {
    Fleet::start(vec![engine(); count]).await.unwrap()
}

/// Tokens that were cached of a prompt that a router was asked for.
pub async fn cached(router: &TestRouter, prefix: usize, serial: usize) -> u64 {
    let answer = router.client().await.post("/v1/chat/completions", chat(prefix, serial)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer: Value = serde_json::from_str(&answer.text()).unwrap();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}
