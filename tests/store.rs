//! A store of `sharing` that lies, stalls, breaks off or is full, and strangers that write to its stream: each is said once in the log, and
//! no request is the worse for it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says why it is left out"
)]

mod redis;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{PASSWORD, Redis, cached, shared, workers};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;
use warmroute::config::{Config, Mode, StoreUrl};
use warmroute::core::blocks::HashKey;
use warmroute::core::elsewhere::News;
use warmroute::engine::http::Running;
use warmroute::peers::news::{Said, VERSION, Writer};
use warmroute::peers::store::Store;
use warmroute::testing::{TestRouter, until};

// === A store that says what the test wants ===

#[derive(Clone)]
enum Says {
    /// As a store that is well.
    Well,
    Bytes(&'static [u8]),
    /// Nothing, ever.
    Nothing,
    /// Breaks the connection off with a reset.
    Reset,
}

/// Serves; answers its port, and counts the commands that it was sent.
async fn store(says: fn(&str) -> Says) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                while let Ok(words) = command(&mut stream).await {
                    if matches!(words[0].as_str(), "XADD" | "XREAD" | "XREVRANGE" | "AUTH") {
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                    let answer: &[u8] = match says(&words[0]) {
                        Says::Bytes(bytes) => bytes,
                        Says::Nothing => continue,
                        Says::Reset => {
                            let _ = stream.get_ref().set_zero_linger();
                            return;
                        }
                        Says::Well => match words[0].as_str() {
                            "XREVRANGE" => b"*0\r\n",
                            "XADD" => b"$3\r\n1-1\r\n",
                            // It waits for news, as it was asked to.
                            "XREAD" => {
                                tokio::time::sleep(Duration::from_millis(200)).await;
                                b"*-1\r\n"
                            }
                            _ => b"+OK\r\n",
                        },
                    };
                    if stream.get_mut().write_all(answer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, asked)
}

/// One command: an array of strings.
async fn raw_command(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<Vec<u8>>> {
    let count = number(stream, '*').await?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut bytes = vec![0; number(stream, '$').await? + 2];
        stream.read_exact(&mut bytes).await?;
        bytes.truncate(bytes.len() - 2);
        words.push(bytes);
    }
    Ok(words)
}

async fn command(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<String>> {
    let words = raw_command(stream).await?;
    Ok(words.iter().map(|word| String::from_utf8_lossy(word).to_ascii_uppercase()).collect())
}

async fn number(stream: &mut BufReader<TcpStream>, kind: char) -> io::Result<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let number = line.trim_end().strip_prefix(kind).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

type Stream = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// A store of one stream, whose clock is behind by so many milliseconds.
async fn late_store(behind: u64) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let stream = Stream::default();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let stream = stream.clone();
            tokio::spawn(async move {
                let mut socket = BufReader::new(socket);
                while let Ok(words) = raw_command(&mut socket).await {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
                    let answer = match words[0].as_slice() {
                        b"XADD" => {
                            let mut stream = stream.lock().unwrap();
                            let last = stream.last().map_or(0, |(ms, _)| *ms);
                            let ms = (now - behind).max(last + 1);
                            stream.push((ms, words.last().unwrap().clone()));
                            format!("$15\r\n{ms}-0\r\n").into_bytes()
                        }
                        b"XREVRANGE" => entries(stream.lock().unwrap().last()),
                        b"XREAD" => {
                            let after = String::from_utf8_lossy(words.last().unwrap()).replace("-0", "");
                            let after: u64 = after.parse().unwrap();
                            let found = entries(stream.lock().unwrap().iter().filter(|(ms, _)| *ms > after));
                            if found == b"*0\r\n" {
                                tokio::time::sleep(Duration::from_millis(20)).await;
                                b"*-1\r\n".to_vec()
                            } else {
                                [b"*1\r\n*2\r\n$1\r\nk\r\n".as_slice(), &found].concat()
                            }
                        }
                        _ => b"+OK\r\n".to_vec(),
                    };
                    if socket.get_mut().write_all(&answer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn entries<'e>(of: impl IntoIterator<Item = &'e (u64, Vec<u8>)>) -> Vec<u8> {
    let of: Vec<_> = of.into_iter().collect();
    let mut bytes = format!("*{}\r\n", of.len()).into_bytes();
    for (ms, batch) in of {
        bytes.extend(format!("*2\r\n$15\r\n{ms}-0\r\n*2\r\n$1\r\nn\r\n${}\r\n", batch.len()).bytes());
        bytes.extend([batch, b"\r\n".as_slice()].concat());
    }
    bytes
}

// === The log of the test's own thread ===

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for Log {
    type Writer = Log;

    fn make_writer(&'w self) -> Log {
        self.clone()
    }
}

impl Log {
    fn begin() -> (Log, DefaultGuard) {
        let log = Log::default();
        let lines = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
        let guard = tracing::subscriber::set_default(lines);
        (log, guard)
    }

    fn lines(&self, with: &str) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(with)).map(str::to_owned).collect()
    }
}

// === Faults of the store ===

/// Ten requests, the second of each prompt finding what the first has left.
async fn serves(router: &TestRouter, from: usize) {
    for prefix in from..from + 5 {
        assert_eq!(cached(router, prefix, 2 * prefix).await, 0);
        assert!(cached(router, prefix, 2 * prefix + 1).await > 1_000);
    }
}

/// A router over such a store serves, says once what is wrong, where, and what to look at, and ends in order.
async fn bears(says: fn(&str) -> Says, attempts: usize, cure: &str) {
    let (log, _guard) = Log::begin();
    let (port, asked) = store(says).await;
    let fleet = workers(2).await;
    let password = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(password.path(), PASSWORD).unwrap();
    let config = TestRouter::config_at(Mode::Kv, fleet.addresses());
    let router = TestRouter::start(shared(port, Some(password.path().to_owned()), config)).await;
    serves(&router, 0).await;
    until("the store to be tried often", async || asked.load(Ordering::Relaxed) >= attempts).await;
    let told = || log.lines("store of sharing");
    until("the log to say it", async || !told().is_empty()).await;
    let unready = router.admin("/readyz").await;
    serves(&router, 10).await;
    let said = told();
    assert!(said.len() == 1 && said[0].contains("WARN"), "{said:?}");
    let address = format!("redis://127.0.0.1:{port}");
    assert!(said[0].contains(cure) && said[0].contains(&address), "{said:?}");
    let shown: Value = serde_json::from_str(&router.admin("/fleet").await).unwrap();
    let shown = &shown["sharing"];
    assert!(shown["fault"].as_str().unwrap().contains(cure), "{shown}");
    assert!(
        unready.starts_with("ready") || unready.contains(cure) && unready.contains(&address),
        "{unready}"
    );
    for text in [log.lines(PASSWORD).concat(), unready, shown.to_string()] {
        assert!(!text.contains(PASSWORD), "{text}");
    }
    assert_eq!(router.metric("warmroute_sharing_connected").await, 0.0);
    router.stop.request();
    router.ended().await;
}

#[tokio::test]
async fn a_store_without_memory() {
    let says = |command: &str| match command {
        "XADD" => Says::Bytes(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
        _ => Says::Well,
    };
    bears(says, 8, "raise its maxmemory").await;
}

#[tokio::test]
async fn a_store_that_is_a_replica() {
    let says = |command: &str| match command {
        "XADD" => Says::Bytes(b"-READONLY You can't write against a read only replica.\r\n"),
        _ => Says::Well,
    };
    bears(says, 8, "it is a replica").await;
}

#[tokio::test]
async fn a_store_that_turns_the_password_away() {
    let says = |command: &str| match command {
        "AUTH" => Says::Bytes(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"),
        _ => Says::Bytes(b"-NOAUTH Authentication required.\r\n"),
    };
    bears(says, 6, "see sharing.password_file").await;
}

#[tokio::test]
async fn a_store_that_lets_the_user_do_too_little() {
    let says = |command: &str| match command {
        "XADD" | "XREAD" => Says::Bytes(b"-NOPERM this user has no permissions to run the command\r\n"),
        _ => Says::Well,
    };
    bears(says, 8, "sharing.user needs XADD").await;
}

#[tokio::test]
async fn a_store_that_has_something_else_under_the_key() {
    let says = |command: &str| match command {
        "XADD" | "XREAD" | "XREVRANGE" => {
            Says::Bytes(b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n")
        }
        _ => Says::Well,
    };
    bears(says, 8, "another name").await;
}

#[tokio::test]
async fn a_store_without_the_database() {
    let says = |command: &str| match command {
        "SELECT" => Says::Bytes(b"-ERR DB index is out of range\r\n"),
        _ => Says::Well,
    };
    let (log, _guard) = Log::begin();
    let (port, _) = store(says).await;
    let fleet = workers(1).await;
    let mut config = shared(port, None, TestRouter::config_at(Mode::Kv, fleet.addresses()));
    let url = StoreUrl::parse(&format!("redis://127.0.0.1:{port}/99")).unwrap();
    config.sharing.iter_mut().for_each(|sharing| sharing.urls = vec![url.clone()]);
    let _router = TestRouter::start(config).await;
    until("the log to say it", async || !log.lines("number of the database in sharing.urls").is_empty())
        .await;
}

#[tokio::test]
async fn a_store_whose_stream_is_at_its_end() {
    let says = |command: &str| match command {
        "XADD" => {
            Says::Bytes(b"-ERR The stream has exhausted the last possible ID, unable to add more items\r\n")
        }
        _ => Says::Well,
    };
    bears(says, 8, "delete the key warmroute:news:").await;
}

#[tokio::test]
async fn a_store_that_is_part_of_a_cluster() {
    let says = |command: &str| match command {
        "XADD" | "XREAD" | "XREVRANGE" => Says::Bytes(b"-MOVED 3999 127.0.0.1:1\r\n"),
        _ => Says::Well,
    };
    bears(says, 8, "sharing.kind: cluster").await;
}

#[tokio::test]
async fn a_store_that_is_none() {
    bears(|_| Says::Bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n"), 2, "no Redis or Valkey").await;
}

#[tokio::test]
async fn a_store_that_resets_connections() {
    let says = |command: &str| match command {
        "XADD" | "XREAD" => Says::Reset,
        _ => Says::Well,
    };
    bears(says, 8, "broke the connection off").await;
}

#[tokio::test]
async fn a_store_that_says_nothing() {
    let says = |command: &str| match command {
        "XADD" | "XREAD" => Says::Nothing,
        _ => Says::Well,
    };
    bears(says, 4, "in time").await;
}

#[tokio::test]
async fn a_store_that_promises_more_than_there_is_memory() {
    let says = |command: &str| match command {
        "XREAD" => Says::Bytes(b"*2000000000\r\n*2000000000\r\n$536870912\r\nshort"),
        "XADD" => Says::Bytes(b"$536870912\r\nshort"),
        _ => Says::Well,
    };
    bears(says, 4, "").await;
}

/// Whatever the store's clock shows, what was placed just now was not placed before the worker began.
#[tokio::test]
async fn a_store_whose_clock_is_behind() {
    let port = late_store(3_600_000).await;
    let fleet = workers(2).await;
    let config = || shared(port, None, TestRouter::config_at(Mode::Kv, fleet.addresses()));
    let (one, other) = (TestRouter::start(config()).await, TestRouter::start(config()).await);
    other.metric_is("warmroute_sharing_peers", 1.0).await;
    let restarted = "warmroute_sharing_dropped_total{reason=\"restarted\"}";
    for prefix in 0..5 {
        assert_eq!(cached(&one, prefix, 2 * prefix).await, 0);
        let heard = async || known(&other) >= known(&one) || other.metric(restarted).await > 0.0;
        until("the other to have heard of it", heard).await;
        assert_eq!(other.metric(restarted).await, 0.0);
        assert!(cached(&other, prefix, 2 * prefix + 1).await > 1_000);
    }
}

// === Strangers at the stream of a real one ===

fn key(config: &Config) -> String {
    let store = Store::new(config.sharing.as_ref().unwrap(), &HashKey([7; 32]), config.cache.block_bytes);
    store.unwrap().key().to_owned()
}

struct Scene {
    redis: Redis,
    _fleet: Running,
    routers: Vec<TestRouter>,
    key: String,
}

impl Scene {
    /// Two routers that know of each other.
    async fn begin() -> Option<Scene> {
        let redis = Redis::start().await?;
        let fleet = workers(2).await;
        let mut routers = Vec::new();
        let config = redis.shared(TestRouter::config_at(Mode::Kv, fleet.addresses()));
        for _ in 0..2 {
            routers.push(TestRouter::start(config.clone()).await);
        }
        let scene = Scene { redis, _fleet: fleet, routers, key: key(&config) };
        scene.each_is("warmroute_sharing_peers", 1.0).await;
        Some(scene)
    }

    async fn each_is(&self, series: &str, value: f64) {
        for router in &self.routers {
            router.metric_is(series, value).await;
        }
    }

    async fn add(&self, batches: impl IntoIterator<Item = Vec<u8>>) {
        let batches: Vec<Vec<u8>> = batches.into_iter().collect();
        let add = |batch| vec![b"XADD".as_slice(), self.key.as_bytes(), b"*", b"n", batch];
        let commands: Vec<_> = batches.iter().map(|batch| add(batch.as_slice())).collect();
        let said = self.redis.ask(&commands).await;
        assert!(!said.contains("-ERR"), "{said}");
    }

    /// What one has placed is warm at the other.
    async fn is_one(&self, prefix: usize) {
        let [one, other] = &self.routers[..] else { unreachable!() };
        assert_eq!(cached(one, prefix, 2 * prefix).await, 0);
        until("the other to have heard of it", async || known(other) >= known(one)).await;
        assert!(cached(other, prefix, 2 * prefix + 1).await > 1_000);
    }
}

fn known(router: &TestRouter) -> usize {
    router.proxy.planner.believed_blocks()
}

fn pulse(router: u64, number: u64) -> Vec<u8> {
    Writer::begin(router, number, None).finish()
}

/// What docs/kubernetes.md says that a user of its own needs.
#[tokio::test]
async fn a_user_who_may_do_only_what_is_needed() {
    let (log, _guard) = Log::begin();
    let Some(redis) = Redis::start().await else { return };
    let secret = format!(">{PASSWORD}");
    let words =
        ["ACL", "SETUSER", "warmroute", "on", &secret, "~warmroute:*", "+xadd", "+xread", "+xrevrange"];
    let said = redis.ask(&[words.iter().map(|word| word.as_bytes()).collect()]).await;
    assert!(!said.contains('-'), "{said}");
    let fleet = workers(1).await;
    let mut config = redis.shared(TestRouter::config_at(Mode::Kv, fleet.addresses()));
    config.sharing.iter_mut().for_each(|sharing| sharing.user = Some("warmroute".to_owned()));
    let router = TestRouter::start(config).await;
    router.metric_is("warmroute_sharing_connected", 1.0).await;
    serves(&router, 0).await;
    assert!(log.lines("WARN").is_empty(), "{:?}", log.lines("WARN"));
}

#[tokio::test]
async fn a_stream_that_is_deleted_is_begun_anew() {
    let (log, _guard) = Log::begin();
    let Some(scene) = Scene::begin().await else { return };
    scene.is_one(1).await;
    scene.redis.tell("FLUSHALL\r\n").await;
    scene.is_one(2).await;
    assert!(log.lines("WARN").is_empty(), "{:?}", log.lines("WARN"));
}

/// The one connection finds at once that it is broken, the other when it writes the next time.
#[tokio::test]
async fn a_break_is_told_once_and_its_end_too() {
    let (log, _guard) = Log::begin();
    let Some(scene) = Scene::begin().await else { return };
    assert_eq!(log.lines("is there").len(), 2, "{:?}", log.lines("store of sharing"));
    scene.redis.tell("CLIENT KILL TYPE normal\r\n").await;
    until("both to be back", async || log.lines("was back after").len() == 2).await;
    assert_eq!(log.lines("WARN").len(), 2, "{:?}", log.lines("store of sharing"));
    scene.is_one(1).await;
}

/// As after a failover to a server whose clock is behind, and which has lost what was said last.
#[tokio::test]
async fn a_stream_that_goes_on_with_earlier_times_is_heard() {
    let Some(scene) = Scene::begin().await else { return };
    scene.is_one(1).await;
    // An hour ahead; whatever comes now without its end would be before it.
    let ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() + 3_600_000;
    scene.redis.tell(&format!("XADD {} {ms}-0 n x\r\n", scene.key)).await;
    scene.each_is("warmroute_sharing_dropped_total{reason=\"malformed\"}", 1.0).await;
    scene.is_one(2).await;
    scene.redis.tell(&format!("DEL {}\r\n", scene.key)).await;
    scene.is_one(3).await;
    scene.each_is("warmroute_sharing_peers", 1.0).await;
}

#[tokio::test]
async fn entries_of_strangers_are_left_alone_and_said_once() {
    let (log, _guard) = Log::begin();
    let Some(scene) = Scene::begin().await else { return };
    let of_version = |version| {
        let mut batch = pulse(77, 1);
        batch[0] = version;
        batch
    };
    scene.add((0..20).map(|_| of_version(VERSION + 1))).await;
    scene.add((0..20).map(|_| vec![VERSION, 1, 2, 3])).await;
    // Larger than any router writes, and without the field that is looked for.
    scene.add([[&[VERSION][..], &[0; 2 << 20]].concat()]).await;
    scene.redis.tell(&format!("XADD {} * a b c d\r\nXADD {} * n x\r\n", scene.key, scene.key)).await;
    scene.each_is("warmroute_sharing_dropped_total{reason=\"version\"}", 20.0).await;
    scene.each_is("warmroute_sharing_dropped_total{reason=\"malformed\"}", 23.0).await;
    scene.is_one(1).await;
    assert_eq!(log.lines("another version").len(), 2, "one line of each router");
    assert_eq!(log.lines("something else than routers").len(), 2);
    assert_eq!(log.lines("WARN").len(), 4, "{:?}", log.lines("WARN"));
}

#[tokio::test]
async fn a_hundred_routers_are_known_and_a_thousand_are_too_many() {
    let (log, _guard) = Log::begin();
    let Some(scene) = Scene::begin().await else { return };
    scene.add((1_000..1_100).map(|router| pulse(router, 1))).await;
    scene.each_is("warmroute_sharing_peers", 101.0).await;
    scene.is_one(1).await;
    scene.add((2_000..3_000).map(|router| pulse(router, 1))).await;
    scene.each_is("warmroute_sharing_peers", 256.0).await;
    scene.is_one(2).await;
    scene.each_is("warmroute_sharing_peers", 1.0).await;
    assert_eq!(log.lines("too many routers").len(), 2);
}

/// One that says more than anybody can do: it is believed, within bounds, and takes nothing from the others.
#[tokio::test]
async fn a_router_that_floods_harms_nobody() {
    let Some(scene) = Scene::begin().await else { return };
    for batch in 0..50u64 {
        let mut writer = Writer::begin(7, batch + 1, None);
        for request in 0..2_000 {
            let news = if request % 2 == 0 { News::FirstToken } else { News::Lost { committed: true } };
            writer.say(&Said { age: u64::MAX, request, news });
        }
        scene.add([writer.finish()]).await;
        if batch % 10 == 0 {
            serves(&scene.routers[0], 100 + batch as usize).await;
        }
    }
    scene.each_is("warmroute_sharing_peers", 2.0).await;
    scene.is_one(1).await;
}
