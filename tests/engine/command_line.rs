//! `warmroute engine` as one starts it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use tokio::time::timeout;

use super::raw::{BOUND, get};

/// Ended when dropped, so that a failing test leaves nothing behind.
struct Engine(Option<Child>);

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
        }
    }
}

fn engine(args: &[&str]) -> Engine {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    Engine(Some(
        command.arg("engine").args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(),
    ))
}

impl Engine {
    async fn lines(&mut self, count: usize) -> Vec<String> {
        let output = BufReader::new(self.0.as_mut().unwrap().stdout.take().unwrap());
        let read =
            tokio::task::spawn_blocking(move || output.lines().take(count).map(Result::unwrap).collect());
        timeout(BOUND, read).await.expect("tells its addresses").unwrap()
    }

    async fn end(mut self) -> Output {
        let child = self.0.take().unwrap();
        let wait = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap());
        timeout(BOUND, wait).await.expect("ends").unwrap()
    }
}

#[tokio::test]
async fn it_tells_its_addresses_serves_and_ends_on_a_signal() {
    let mut engine = engine(&["--workers", "2", "--port", "0", "--model", "m", "--blocks", "100"]);
    for line in engine.lines(2).await {
        let address = line.strip_prefix("http://").unwrap().parse().unwrap();
        let models = get(address, "/v1/models").await.json();
        assert_eq!(
            (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
            (&"m".into(), &1584.into())
        );
    }
    let pid = engine.0.as_ref().unwrap().id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(engine.end().await.status.success());
}

#[tokio::test]
async fn settings_that_cannot_be_are_named() {
    for (args, expected) in [
        (["--time-scale", "0"], "`time_scale` must be a number above 0, got 0"),
        (["--blocks", "1"], "`num_blocks` must be at least 2, got 1"),
        (["--max-model-len", "9345"], "`max_model_len` is 9345, but the KV cache holds 9344 tokens"),
    ] {
        let output = engine(&[["--port", "0"], args].concat()).end().await;
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(expected), "{message}");
    }
}
