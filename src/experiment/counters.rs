//! What the engines themselves counted: hits and look-ups of the prefix cache in tokens, requests and preemptions, read from
//! every worker's `/metrics` before and after a run.
//!
//! vLLM counts a look-up each time it is made, so a request that waits for memory or is preempted counts again: where that
//! happened the counters fall short of `usage`, which is the truth of a request.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

use crate::experiment::target::Target;

/// The engines' `/metrics` pages that together cover the target's workers.
#[derive(Clone, Debug)]
pub struct Workers {
    pages: Vec<Target>,
}

/// One worker's counters since it started, or their change. Tokens for hits and queries.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub hits: f64,
    pub queries: f64,
    pub finished: f64,
    pub preemptions: f64,
}

/// All workers' counters at one time, or their change, by worker address.
pub type Snapshot = BTreeMap<String, Counts>;

/// The cache of one worker, as far as it says.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct CacheConfig {
    pub block_size: Option<u32>,
    pub num_gpu_blocks: Option<u32>,
}

impl CacheConfig {
    /// Size of the whole cache, in tokens.
    pub fn tokens(&self) -> Option<u64> {
        Some(u64::from(self.block_size?) * u64::from(self.num_gpu_blocks?))
    }
}

impl Workers {
    /// `urls` as given on the command line, with or without `/metrics` at the end.
    pub async fn resolve(urls: &[String]) -> Result<Workers> {
        let mut pages = Vec::new();
        for url in urls {
            let base = url.trim_end_matches('/');
            let base = base.strip_suffix("/metrics").unwrap_or(base);
            pages.push(Target::resolve(base).await?);
        }
        Ok(Workers { pages })
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Reads all pages.
    ///
    /// # Errors
    /// If a page cannot be read or is not that of a vLLM with a prefix cache: a share of hits over some of the workers only
    /// would be misleading.
    pub async fn read(&self) -> Result<Snapshot> {
        let mut snapshot = Snapshot::new();
        for page in &self.pages {
            let text = page_text(page).await?;
            let counts = Counts::parse(&text).with_context(|| format!("{page}/metrics"))?;
            snapshot.insert(page.authority().to_owned(), counts);
        }
        Ok(snapshot)
    }

    /// What the first worker says of its cache.
    pub async fn cache_config(&self) -> Result<CacheConfig> {
        match self.pages.first() {
            Some(page) => Ok(parse_cache_config(&page_text(page).await?)),
            None => Ok(CacheConfig::default()),
        }
    }
}

async fn page_text(page: &Target) -> Result<String> {
    let (status, text) = page.get("/metrics").await?;
    if !status.is_success() {
        bail!("GET {page}/metrics: status {status}; --metrics wants the engines' own pages");
    }
    Ok(text)
}

impl Counts {
    fn parse(text: &str) -> Result<Counts> {
        let total = |name: &str| {
            let values: Vec<f64> = samples(text, name).map(|(_, value)| value).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>())
        };
        let needed = |name: &str| {
            total(name).with_context(|| format!("no `{name}`: not a vLLM worker, or its prefix cache is off"))
        };
        Ok(Counts {
            hits: needed("vllm:prefix_cache_hits_total")?,
            queries: needed("vllm:prefix_cache_queries_total")?,
            finished: total("vllm:request_success_total").unwrap_or(0.0),
            preemptions: total("vllm:num_preemptions_total").unwrap_or(0.0),
        })
    }

    fn minus(self, earlier: Counts) -> Counts {
        Counts {
            hits: self.hits - earlier.hits,
            queries: self.queries - earlier.queries,
            finished: self.finished - earlier.finished,
            preemptions: self.preemptions - earlier.preemptions,
        }
    }

    fn plus(self, other: Counts) -> Counts {
        Counts {
            hits: self.hits + other.hits,
            queries: self.queries + other.queries,
            finished: self.finished + other.finished,
            preemptions: self.preemptions + other.preemptions,
        }
    }
}

/// What a proxy has believed of the prompts that it placed, in tokens.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Belief {
    /// Believed to be cached where the request was sent.
    pub predicted: f64,
    pub prompt_tokens: f64,
}

impl Belief {
    /// From the `/metrics` of a warmroute's admin listener; both are zero before its first answer.
    ///
    /// # Errors
    /// If that cannot be read.
    pub async fn read(admin: &Target) -> Result<Belief> {
        let (status, text) = admin.get("/metrics").await?;
        if !status.is_success() {
            bail!("GET {admin}/metrics: status {status}; --admin wants the admin listener of a warmroute");
        }
        let total = |name: &str| samples(&text, name).map(|(_, value)| value).sum();
        Ok(Belief {
            predicted: total("warmroute_predicted_cached_tokens_total"),
            prompt_tokens: total("warmroute_prompt_tokens_total"),
        })
    }

    pub fn minus(self, earlier: Belief) -> Belief {
        Belief {
            predicted: self.predicted - earlier.predicted,
            prompt_tokens: self.prompt_tokens - earlier.prompt_tokens,
        }
    }

    /// Predicted of all prompt tokens.
    pub fn share(self) -> f64 {
        self.predicted / self.prompt_tokens.max(1.0)
    }
}

/// The change from `earlier` to `later`.
///
/// # Errors
/// If a counter fell: the worker restarted in between, and its share of the run is lost.
pub fn change(earlier: &Snapshot, later: &Snapshot) -> Result<Snapshot> {
    let mut change = Snapshot::new();
    for (worker, &now) in later {
        let before = earlier.get(worker).copied().unwrap_or_default();
        let counts = now.minus(before);
        if counts.queries < 0.0 || counts.hits < 0.0 {
            bail!("worker {worker} restarted during the run: its counters fell");
        }
        change.insert(worker.clone(), counts);
    }
    Ok(change)
}

/// Over all workers.
pub fn total(snapshot: &Snapshot) -> Counts {
    snapshot.values().fold(Counts::default(), |sum, &counts| sum.plus(counts))
}

/// The samples called exactly `name` in a Prometheus text page: labels as written, and value.
fn samples<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None if rest.starts_with(' ') => ("", rest),
            None => return None,
        };
        // A time stamp may follow the value.
        Some((labels, value.split_whitespace().next()?.parse().ok()?))
    })
}

fn parse_cache_config(text: &str) -> CacheConfig {
    let label = |name: &str| {
        let (labels, _) = samples(text, "vllm:cache_config_info").next()?;
        let quoted = format!("{name}=\"");
        labels.split(',').find_map(|label| label.strip_prefix(&quoted)?.strip_suffix('"')?.parse().ok())
    };
    CacheConfig { block_size: label("block_size"), num_gpu_blocks: label("num_gpu_blocks") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 911.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 9.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7959634039786506e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 6.4e+02
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a}b"} 39.0 1795963403
vllm:cache_config_info{block_size="16",engine="0",hash_block_size="None",num_gpu_blocks="585",num_gpu_blocks_override="586"} 1.0
"#;

    #[test]
    fn reads_a_vllm_page() {
        let counts = Counts::parse(PAGE).unwrap();
        let expected = Counts { hits: 640.0, queries: 920.0, finished: 41.0, preemptions: 2.0 };
        assert_eq!(counts, expected);
        let config = parse_cache_config(PAGE);
        assert_eq!(config, CacheConfig { block_size: Some(16), num_gpu_blocks: Some(585) });
        assert_eq!(parse_cache_config(""), CacheConfig::default());
    }

    #[test]
    fn another_servers_page_is_refused_by_name() {
        let error = format!("{:#}", Counts::parse("process_cpu_seconds_total 1.0\n").unwrap_err());
        assert!(error.contains("vllm:prefix_cache_hits_total"), "{error}");
    }

    #[test]
    fn a_counter_that_fell_is_a_restart() {
        let at = |queries| Snapshot::from([("w".to_owned(), Counts { queries, ..Counts::default() })]);
        assert_eq!(total(&change(&at(5.0), &at(9.0)).unwrap()).queries, 4.0);
        assert!(change(&at(9.0), &at(5.0)).unwrap_err().to_string().contains("restarted"));
    }
}
