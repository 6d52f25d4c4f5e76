//! The proxy as a whole: [`build`] checks and binds everything, [`Bound::run`] serves until it is asked to end.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep_until, timeout};

use crate::config::watch::{self, Source};
use crate::config::{Config, ConfigError};
use crate::core::blocks::HashKey;
use crate::core::planner::{self, Planner};
use crate::fleet::{Fleet, probe, scrape};
use crate::lifecycle::{Clock, Drain, Phase, Stop, Urgency};
use crate::metrics::{Metrics, Reload};
use crate::proxy::{self, Proxy};
use crate::{admin, lifecycle};

/// Connections that the system holds for us until we take them.
const BACKLOG: u32 = 4096;
/// How often timers of the fleet are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long connections that were cut have to close.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Why the proxy cannot start.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("{key}: cannot listen on {address}: {cause}")]
    Bind { key: &'static str, address: SocketAddr, cause: io::Error },
}

/// How the proxy ended.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Every request that was taken was answered.
    Drained,
    /// Requests were cut, by the deadline or on demand.
    Cut,
}

/// Everything that can fail has been done; nothing is served yet.
pub struct Bound {
    clients: TcpListener,
    operator: TcpListener,
    proxy: Arc<Proxy>,
}

/// Binds both listeners and puts the parts together. To be called within a runtime.
///
/// # Errors
/// If a listener cannot be bound; names the key.
pub fn build(config: Config) -> Result<Bound, StartError> {
    let clients = bind("listen", config.listen)?;
    let operator = bind("admin", config.admin)?;
    let clock = Clock::start();
    let metrics = Metrics::new();
    let planner = Planner::new(planner::Settings {
        price: config.price.clone(),
        max_blocks: config.cache.max_blocks,
        ..planner::Settings::default()
    });
    let fleet = Fleet::new(config.health.clone(), planner.clone(), metrics.clone(), clock);
    fleet.set_scrape_settings(config.scrape.clone());
    fleet.set_workers(&config.workers.fixed);
    let hash_key = config.hash_key.clone().unwrap_or_else(|| HashKey(rand::random()));
    let proxy = Proxy::new(config, hash_key, fleet, planner, metrics, clock, Drain::default());
    Ok(Bound { clients, operator, proxy })
}

fn bind(key: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|cause| StartError::Bind { key, address, cause })
}

impl Bound {
    /// Where clients connect: the port is known even if the config left it open.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn client_address(&self) -> io::Result<SocketAddr> {
        self.clients.local_addr()
    }

    /// Where the operator connects.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.operator.local_addr()
    }

    pub fn proxy(&self) -> &Arc<Proxy> {
        &self.proxy
    }

    /// Serves until `stop`. `file` is followed for edits.
    pub async fn run(self, stop: Stop, file: Option<Source>) -> Ended {
        let Bound { clients, operator, proxy } = self;
        if let (Ok(clients), Ok(operator)) = (clients.local_addr(), operator.local_addr()) {
            let mode = proxy.config.load().mode.as_str();
            tracing::info!(%clients, admin = %operator, mode, "serving");
        }
        let (api_key, connect) = {
            let config = proxy.config.load();
            (config.workers.api_key.clone(), config.timeouts.connect)
        };
        // Dropped at the end, and with it whatever still runs in it.
        let mut tasks = JoinSet::new();
        tasks.spawn(probe::run(proxy.fleet.clone(), api_key.clone(), connect));
        tasks.spawn(scrape::run(proxy.fleet.clone(), api_key, connect));
        tasks.spawn(tick(proxy.clone()));
        tasks.spawn(admin::serve(operator, proxy.clone()));
        tasks.spawn(proxy::server::serve(clients, proxy.clone()));
        if let Some(file) = file {
            tasks.spawn(follow_config(file, proxy.clone()));
        }
        leave(&proxy, &stop).await
    }
}

async fn tick(proxy: Arc<Proxy>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pool_idle = proxy.config.load().timeouts.pool_idle;
        proxy.fleet.tick(pool_idle);
    }
}

/// Waits to be asked to end, and ends in order: announce, drain, cut.
async fn leave(proxy: &Proxy, stop: &Stop) -> Ended {
    stop.at_least(Urgency::Drain).await;
    let asked = Instant::now();
    let times = proxy.config.load().drain.clone();
    let drain = &proxy.drain;
    tracing::info!(announce = ?times.announce, deadline = ?times.deadline, "leaving");
    drain.advance(Phase::Leaving);
    tokio::select! {
        () = sleep_until(asked + times.announce) => {}
        () = stop.at_least(Urgency::Now) => {}
    }
    drain.advance(Phase::Draining);
    let ended = tokio::select! {
        biased;
        () = drain.all_done() => Ended::Drained,
        () = stop.at_least(Urgency::Now) => Ended::Cut,
        () = sleep_until(asked + times.deadline) => Ended::Cut,
    };
    if ended == Ended::Cut {
        tracing::warn!(requests = proxy.metrics.in_flight.get(), "cutting what still runs");
        drain.advance(Phase::Cut);
        let _ = timeout(CUT_GRACE, drain.all_done()).await;
    }
    tracing::info!(?ended, "left");
    ended
}

/// Takes up edits of the config file, and looks at it at once on SIGHUP.
async fn follow_config(file: Source, proxy: Arc<Proxy>) {
    let look_now = Arc::new(Notify::new());
    let on_signal = async {
        match lifecycle::on_hangup(&look_now) {
            Ok(listening) => listening.await,
            Err(error) => {
                tracing::warn!("SIGHUP will not be heard: {error}");
                pending().await
            }
        }
    };
    tokio::select! {
        () = watch::watch(file, &look_now, |read| take_up(&proxy, read)) => {}
        () = on_signal => {}
    }
}

fn take_up(proxy: &Proxy, read: Result<Config, ConfigError>) {
    let result = match read {
        Err(error) => {
            tracing::error!("the edited config is refused and the old one stays in force: {error}");
            Reload::Refused
        }
        Ok(new) => {
            let old = proxy.config.load_full();
            if old.to_yaml() == new.to_yaml() {
                tracing::info!("the config was read again and says the same");
                Reload::Unchanged
            } else {
                for key in needs_restart(&old, &new) {
                    tracing::warn!("{key}: the edit takes effect at the next start");
                }
                proxy.reconfigure(new);
                tracing::info!("the edited config is in force");
                Reload::Applied
            }
        }
    };
    proxy.metrics.reloads.inc(result);
}

/// The keys that differ and are only read at the start.
fn needs_restart(old: &Config, new: &Config) -> Vec<&'static str> {
    [
        ("listen", old.listen != new.listen),
        ("admin", old.admin != new.admin),
        ("workers.api_key_file", old.workers.api_key_file != new.workers.api_key_file),
        ("cache", old.cache != new.cache),
        ("price", old.price != new.price),
        ("limits.connections", old.limits.connections != new.limits.connections),
        ("log", old.log != new.log),
    ]
    .into_iter()
    .filter_map(|(key, differs)| differs.then_some(key))
    .collect()
}
