//! The real proxy, in this process, on ports of its own.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::{FakeEngine, Wire, soon, until};
use crate::app::{self, Bound, Ended};
use crate::config::watch::Source;
use crate::config::{Config, Mode, Origin, Worker};
use crate::lifecycle::Stop;
use crate::proxy::Proxy;
use crate::threads::Threads;

/// A running proxy. Dropped, it is stopped at once.
pub struct TestRouter {
    pub clients: SocketAddr,
    pub admin: SocketAddr,
    pub proxy: Arc<Proxy>,
    pub stop: Stop,
    running: JoinHandle<Ended>,
}

impl TestRouter {
    /// The default config on free loopback ports, with these workers.
    pub fn config(mode: Mode, engines: &[&FakeEngine]) -> Config {
        let addresses: Vec<SocketAddr> = engines.iter().map(|engine| engine.address()).collect();
        TestRouter::config_at(mode, &addresses)
    }

    /// The same with workers at these addresses.
    pub fn config_at(mode: Mode, workers: &[SocketAddr]) -> Config {
        let mut config = Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            admin: SocketAddr::from(([127, 0, 0, 1], 0)),
            mode,
            ..Config::default()
        };
        config.workers.fixed = workers
            .iter()
            .map(|address| Worker {
                url: Origin::parse(&format!("http://{address}")).expect("an address of a worker"),
                capacity_tokens: None,
                prefill_speed: None,
            })
            .collect();
        config
    }

    /// Starts the proxy and waits until every worker is usable.
    pub async fn start(config: Config) -> TestRouter {
        TestRouter::start_on(Threads::here(), config).await
    }

    /// The same, with clients served by these threads.
    pub async fn start_on(threads: Threads, config: Config) -> TestRouter {
        let workers = config.workers.fixed.len();
        let router = TestRouter::run(app::build(config).expect("free ports").on(threads), None);
        let proxy = router.proxy.clone();
        until("every worker to be usable", async || proxy.fleet.snapshot().eligible().len() == workers).await;
        router
    }

    /// Starts the proxy and waits for nothing; `file` is followed for edits.
    pub async fn start_unready(config: Config, file: Option<Source>) -> TestRouter {
        TestRouter::run(app::build(config).expect("free ports"), file)
    }

    fn run(bound: Bound, file: Option<Source>) -> TestRouter {
        let clients = bound.client_address().expect("a bound listener has an address");
        let admin = bound.admin_address().expect("a bound listener has an address");
        let proxy = bound.proxy().clone();
        let stop = Stop::default();
        let running = tokio::spawn(bound.run(stop.clone(), file));
        TestRouter { clients, admin, proxy, stop, running }
    }

    /// In the given mode before these workers.
    pub async fn before(mode: Mode, engines: &[&FakeEngine]) -> TestRouter {
        TestRouter::start(TestRouter::config(mode, engines)).await
    }

    /// A new client connection.
    pub async fn client(&self) -> Wire {
        Wire::connect(self.clients).await
    }

    /// A page of the admin listener.
    pub async fn admin(&self, path: &str) -> String {
        Wire::connect(self.admin).await.get(path).await.text()
    }

    /// The value of one series on the metrics page, zero if it is not there. `series` is written as on the page.
    pub async fn metric(&self, series: &str) -> f64 {
        let page = self.admin("/metrics").await;
        page.lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
            .unwrap_or_default()
    }

    /// Waits until a series has a value.
    pub async fn metric_is(&self, series: &str, value: f64) {
        until(&format!("{series} to be {value}"), async || self.metric(series).await == value).await;
    }

    /// Waits for the end, which must have been asked for.
    pub async fn ended(mut self) -> Ended {
        soon("the proxy to end", &mut self.running).await.expect("the proxy does not panic")
    }
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        self.running.abort();
    }
}
