//! The proxy as a whole: [`build`] checks and binds everything, [`Bound::run`] serves until it is asked to end.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry_otlp::ExporterBuildError;
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep_until, timeout};
use tracing_appender::non_blocking::WorkerGuard;

use crate::config::watch::{self, Source};
use crate::config::{Config, ConfigError};
use crate::core::planner::{self, Planner};
use crate::fleet::stream::Secure;
use crate::fleet::{Fleet, discovery, listing, probe, scrape, stream};
use crate::lifecycle::{Clock, Drain, Phase, Stop, Urgency};
use crate::metrics::{Metrics, Reload};
use crate::peers::store::Store;
use crate::proxy::access::AccessLog;
use crate::proxy::note::Records;
use crate::proxy::tls::{Acceptor, Followed};
use crate::proxy::traces::{Sending, Traces};
use crate::proxy::{self, Proxy};
use crate::threads::Threads;
use crate::{admin, lifecycle};

/// Connections that the system holds for us until we take them.
const BACKLOG: u32 = 4096;
/// How often timers of the fleet are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long the last spans of traces have to be sent.
const LAST_SPANS: Duration = Duration::from_secs(2);
/// How long connections that were cut have to close: they get their last words first.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Why the proxy cannot start.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("{key}: cannot listen on {address}: {cause}")]
    Bind { key: &'static str, address: SocketAddr, cause: io::Error },
    #[error("{0}")]
    Tls(String),
    #[error("{0}")]
    Workers(String),
    #[error("log.access.to: cannot be opened: {0}")]
    Access(io::Error),
    #[error("{0}")]
    Sharing(String),
    #[error("log.traces.to: {0}")]
    Traces(#[from] ExporterBuildError),
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
    tls: Option<(Acceptor, Followed)>,
    authorities: stream::Followed,
    /// Writes the access log's last lines when it is dropped.
    access: Option<WorkerGuard>,
    spans: Option<Sending>,
    store: Option<Arc<Store>>,
    threads: Threads,
    proxy: Arc<Proxy>,
}

/// Binds both listeners and puts the parts together. To be called within a runtime.
///
/// # Errors
/// If a listener cannot be bound or a certificate not be used; names the key.
pub fn build(config: Config) -> Result<Bound, StartError> {
    let tls = config.tls.as_ref().map(Acceptor::new).transpose().map_err(StartError::Tls)?;
    let (secure, authorities) = Secure::new(&config.workers.tls).map_err(StartError::Tls)?;
    discovery::check(&config.workers).map_err(StartError::Workers)?;
    let (access, last_lines) = AccessLog::open(&config.log.access).map_err(StartError::Access)?;
    let (traces, spans) = Traces::open(&config.log.traces)?;
    let records = Records::new(access, traces);
    let store = match (&config.sharing, &config.hash_key) {
        (Some(sharing), Some(key)) => {
            Some(Store::new(sharing, key, config.cache.block_bytes).map_err(StartError::Sharing)?)
        }
        _ => None,
    };
    let clients = bind("listen", config.listen)?;
    let operator = bind("admin", config.admin)?;
    let clock = Clock::start();
    let metrics = Metrics::new();
    let planner = Planner::new(planner::Settings {
        price: config.price.clone(),
        max_blocks: config.cache.max_blocks,
        ..planner::Settings::default()
    });
    let fleet = Fleet::new(config.health.clone(), planner.clone(), metrics.clone(), secure, clock);
    fleet.set_scrape_settings(config.scrape.clone());
    fleet.configure(&config.workers);
    let proxy = Proxy::new(config, fleet, planner, metrics, clock, Drain::default(), records);
    let threads = Threads::here();
    Ok(Bound { clients, operator, tls, authorities, access: last_lines, spans, store, threads, proxy })
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

    /// Has clients served by `threads`; unless told, the caller's runtime does that as well.
    #[must_use]
    pub fn on(self, threads: Threads) -> Bound {
        Bound { threads, ..self }
    }

    /// Serves until `stop`. `file` is followed for edits.
    pub async fn run(self, stop: Stop, file: Option<Source>) -> Ended {
        let Bound { clients, operator, tls, authorities, access: _last_lines, spans, store, threads, proxy } =
            self;
        let threads = Arc::new(threads);
        let following = file.map(|file| follow_config(file, proxy.clone()));
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
        tasks.spawn(scrape::run(proxy.fleet.clone(), api_key.clone(), connect));
        tasks.spawn(listing::run(proxy.fleet.clone(), api_key, connect));
        tasks.spawn(discovery::run(proxy.fleet.clone(), proxy.metrics.clone()));
        tasks.spawn(tick(proxy.clone()));
        if let Some(store) = store {
            tasks.spawn(share(store, proxy.clone()));
        }
        tasks.spawn(admin::serve(operator, proxy.clone()));
        tasks.spawn(authorities.follow());
        let acceptor = tls.map(|(acceptor, files)| {
            tasks.spawn(acceptor.clone().follow(files));
            acceptor
        });
        tasks.spawn(proxy::server::serve(clients, acceptor, threads.clone(), proxy.clone()));
        if let Some(following) = following {
            tasks.spawn(following);
        }
        let spans = spans.map(|spans| tokio::spawn(spans.run()));
        let ended = leave(&proxy, &stop).await;
        // What was cut is recorded before the records are closed.
        drop(threads);
        proxy.fleet.last_words();
        if let Some(peers) = &proxy.peers {
            peers.leave(proxy.clock.now()).await;
        }
        proxy.records.traces.finish();
        if let Some(spans) = spans {
            let _ = timeout(LAST_SPANS, spans).await;
        }
        ended
    }
}

/// Tells other routers and hears them.
async fn share(store: Arc<Store>, proxy: Arc<Proxy>) {
    let Some(delay) = proxy.config.load().sharing.as_ref().map(|sharing| sharing.delay) else { return };
    let Some(peers) = proxy.peers.clone() else { return };
    let (fleet, planner, clock) = (proxy.fleet.clone(), proxy.planner.clone(), proxy.clock);
    peers.run(store, delay, fleet, planner, proxy, clock).await;
}

async fn tick(proxy: Arc<Proxy>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pool_idle = proxy.config.load().timeouts.pool_idle;
        proxy.fleet.tick(pool_idle);
        proxy.complaints.tell();
        proxy.sync_shadow();
        proxy.records.count_lost(&proxy.metrics, &proxy.complaints);
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

/// Takes up edits of the config file. On SIGHUP, which is heard from the call on, looks at it at once, and at the access log's file.
fn follow_config(file: Source, proxy: Arc<Proxy>) -> impl Future<Output = ()> {
    let look_now = Arc::new(Notify::new());
    let hangup = lifecycle::on_hangup({
        let (look_now, proxy) = (look_now.clone(), proxy.clone());
        move || {
            look_now.notify_one();
            proxy.records.access.reopen();
        }
    });
    // As the file said last. What is in force may be another mode since, and holds back what needs a restart. Taken before anybody
    // can switch the mode, which may be before the future runs for the first time.
    let mut from_file = proxy.config.load_full();
    async move {
        let on_signal = async {
            match hangup {
                Ok(listening) => listening.await,
                Err(error) => {
                    tracing::warn!("SIGHUP will not be heard: {error}");
                    pending().await
                }
            }
        };
        tokio::select! {
            () = watch::watch(file, &look_now, |read| take_up(&proxy, &mut from_file, read)) => {}
            () = on_signal => {}
        }
    }
}

fn take_up(proxy: &Proxy, from_file: &mut Arc<Config>, read: Result<Config, ConfigError>) {
    // What the next start would refuse is refused now, while there is somebody to read it.
    let checked = read.map_err(|error| error.to_string());
    let checked = checked.and_then(|new| discovery::check(&new.workers).map(|()| new));
    let result = match checked {
        Err(error) => {
            tracing::error!("the edited config is refused and the old one stays in force: {error}");
            Reload::Refused
        }
        Ok(new) => {
            if from_file.to_yaml() == new.to_yaml() {
                tracing::info!("the config was read again and says the same");
                Reload::Unchanged
            } else {
                put_in_force(proxy, from_file, new);
                Reload::Applied
            }
        }
    };
    proxy.metrics.reloads.inc(result);
}

/// The mode that was said last counts, by an edit of `mode` in the file or through the admin listener. So an edit of
/// something else does not take back what an operator has switched.
fn put_in_force(proxy: &Proxy, from_file: &mut Arc<Config>, new: Config) {
    let running = proxy.config.load_full();
    for key in needs_restart(&running, &new) {
        tracing::warn!("{key}: the edit takes effect at the next start");
    }
    let mode = Some(new.mode).filter(|mode| *mode != from_file.mode);
    *from_file = Arc::new(new.clone());
    proxy.reconfigure(without_restart(&running, new), mode);
    tracing::info!("the edited config is in force");
    let in_force = proxy.config.load().mode;
    if mode.is_some() {
        tracing::info!(mode = in_force.as_str(), "mode set by the config file");
    } else if in_force != from_file.mode {
        let file = from_file.mode.as_str();
        tracing::info!(
            mode = in_force.as_str(),
            file,
            "mode left as it was switched through the admin listener"
        );
    }
}

/// What is only read at the start.
struct Fixed {
    key: &'static str,
    differs: fn(&Config, &Config) -> bool,
    /// Has the first keep what the second says.
    keep: fn(&mut Config, &Config),
}

macro_rules! fixed {
    ($($key:literal: $($field:ident).+),* $(,)?) => {
        [$(Fixed {
            key: $key,
            differs: |one, two| one.$($field).+ != two.$($field).+,
            keep: |new, running| new.$($field).+ = running.$($field).+.clone(),
        }),*]
    };
}

const FIXED: [Fixed; 12] = fixed! {
    "listen": listen,
    "admin": admin,
    "tls": tls,
    "shadow": shadow,
    "workers.tls": workers.tls,
    "workers.zone_file": workers.zone_file,
    "workers.api_key_file": workers.api_key_file,
    "cache": cache,
    "sharing": sharing,
    "price": price,
    "limits.connections": limits.connections,
    "log": log,
};

/// `new`, as far as it can be put in force without a restart.
fn without_restart(running: &Config, mut new: Config) -> Config {
    FIXED.iter().for_each(|fixed| (fixed.keep)(&mut new, running));
    // The secrets go with their files.
    new.workers.api_key.clone_from(&running.workers.api_key);
    new.workers.zone.clone_from(&running.workers.zone);
    new.hash_key.clone_from(&running.hash_key);
    new
}

/// The keys that differ and are only read at the start.
fn needs_restart(old: &Config, new: &Config) -> Vec<&'static str> {
    FIXED.iter().filter(|fixed| (fixed.differs)(old, new)).map(|fixed| fixed.key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Limits, Mode};

    struct Edited {
        proxy: Arc<Proxy>,
        from_file: Arc<Config>,
    }

    impl Edited {
        fn begin(config: &Config) -> Edited {
            let proxy = build(config.clone()).unwrap().proxy().clone();
            Edited { from_file: proxy.config.load_full(), proxy }
        }

        fn take_up(&mut self, config: &Config) -> Arc<Config> {
            take_up(&self.proxy, &mut self.from_file, Ok(config.clone()));
            self.proxy.config.load_full()
        }
    }

    fn config() -> Config {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        Config { listen: here, admin: here, ..Config::default() }
    }

    #[tokio::test]
    async fn the_mode_that_was_said_last_counts() {
        let config = config();
        let mut edited = Edited::begin(&config);
        edited.proxy.set_mode(Mode::Random);
        assert_eq!(edited.take_up(&config).mode, Mode::Random, "the file says what it said");

        let mut other = config.clone();
        other.retries.attempts += 1;
        let in_force = edited.take_up(&other);
        assert_eq!((in_force.mode, in_force.retries.attempts), (Mode::Random, other.retries.attempts));
        assert_eq!(
            edited.take_up(&config).retries,
            config.retries,
            "back to what it said before is an edit too"
        );

        let random = Config { mode: Mode::Random, ..config.clone() };
        edited.take_up(&random);
        assert_eq!(edited.take_up(&config).mode, Mode::Kv, "an edit of the mode itself");
        edited.take_up(&random);
        edited.proxy.set_mode(Mode::Kv);
        assert_eq!(edited.take_up(&random).mode, Mode::Kv);
    }

    #[tokio::test]
    async fn what_needs_a_restart_is_not_shown_as_in_force() {
        let config = config();
        let mut edited = Edited::begin(&config);
        let mut other = config.clone();
        other.cache.block_bytes *= 2;
        other.limits.connections += 1;
        other.limits.queue += 1;
        let in_force = edited.take_up(&other);
        assert_eq!(in_force.cache, config.cache);
        assert_eq!(in_force.limits, Limits { queue: other.limits.queue, ..config.limits.clone() });
        assert_eq!(needs_restart(&in_force, &other), ["cache", "limits.connections"]);
        assert!(needs_restart(&edited.take_up(&config), &config).is_empty());
    }

    #[tokio::test]
    async fn an_edit_that_the_next_start_would_refuse_is_refused() {
        let parsed = |api: &str| {
            let text =
                format!("workers: {{kubernetes: [{{service: a, namespace: b}}], kubernetes_api: {api}}}");
            let workers = Config::parse(&text, std::path::Path::new("c.yaml")).unwrap().workers;
            Config { workers, ..config() }
        };
        let mut edited = Edited::begin(&config());
        let bad = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(bad.path(), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        let bad = bad.path().display();
        for api in ["{}", "{url: 'https://127.0.0.1:1', ca: /nonexistent}", "{url: 'https://127.0.0.1:1'}"] {
            assert!(build(parsed(api)).is_err(), "{api}");
            assert!(edited.take_up(&parsed(api)).workers.kubernetes.is_empty(), "{api}");
        }
        let no_certificate = format!("{{url: 'https://127.0.0.1:1', ca: '{bad}', token_file: '{bad}'}}");
        assert!(build(parsed(&no_certificate)).is_err());
        assert!(edited.take_up(&parsed(&no_certificate)).workers.kubernetes.is_empty());
        let page = String::from_utf8(edited.proxy.metrics.render()).unwrap();
        assert!(page.contains("warmroute_config_reloads_total{result=\"refused\"} 4"), "{page}");
        // How the API server is reached is part of the edit.
        let in_force = edited.take_up(&parsed("{url: 'http://127.0.0.1:1'}"));
        assert_eq!(in_force.workers.kubernetes_api.url.as_deref(), Some("http://127.0.0.1:1"));
        assert_eq!(edited.proxy.fleet.sources_status().0.len(), 1);
    }
}
