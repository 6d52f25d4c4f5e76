//! What `/metrics` shows, under vLLM 0.32's names, labels and buckets. All durations are in model seconds. Left out are what
//! the model has no notion of (FLOPs, external caches' tiers, Python's own) and the HTTP layer's `http_*`.

use std::fmt::Write;

use super::config::EngineConfig;
use crate::core::ids::Time;
use crate::engine::model::{Counters, What};

const TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_TIME: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const PHASE: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const CHOICES: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
const PREEMPTIONS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

/// 1, 2, 5, 10, ... up to `most`.
fn one_two_five(most: u32) -> Vec<f64> {
    let steps = (0..10).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    steps.take_while(|&bound| bound <= f64::from(most)).collect()
}

struct Histogram {
    bounds: Vec<f64>,
    /// One for each bound and one for what is above all.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: impl Into<Vec<f64>>) -> Histogram {
        let bounds = bounds.into();
        Histogram { counts: vec![0; bounds.len() + 1], bounds, sum: 0.0 }
    }

    fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }
}

/// When what happened to one request of the model.
#[derive(Clone)]
pub(super) struct Timeline {
    arrived: Time,
    admitted: Time,
    first_token: Time,
    last_token: Time,
    prompt: u32,
    output: u32,
    cached: u32,
    preemptions: u32,
}

impl Timeline {
    pub fn new(arrived: Time, prompt: u32, output: u32) -> Timeline {
        Timeline {
            arrived,
            admitted: arrived,
            first_token: arrived,
            last_token: arrived,
            prompt,
            output,
            cached: 0,
            preemptions: 0,
        }
    }
}

/// What is read off the model when asked.
pub(super) struct Gauges {
    pub running: usize,
    pub waiting: usize,
    pub kv_cache_usage: f64,
    pub counters: Counters,
}

/// What is counted as it happens.
pub(super) struct Metrics {
    model: String,
    cache_config: String,
    started: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    generation_tokens: u64,
    stopped: u64,
    cut: u64,
    prompt: Histogram,
    generation: Histogram,
    asked_generation: Histogram,
    n: Histogram,
    max_tokens: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    preempted: Histogram,
    computed: Histogram,
}

impl Metrics {
    pub fn new(config: &EngineConfig, started: f64) -> Metrics {
        let tokens = one_two_five(config.max_model_len());
        let phase = || Histogram::new(PHASE);
        Metrics {
            model: escaped(&config.model),
            cache_config: cache_config(config),
            started,
            prompt_tokens: 0,
            cached_tokens: 0,
            generation_tokens: 0,
            stopped: 0,
            cut: 0,
            prompt: Histogram::new(tokens.clone()),
            generation: Histogram::new(tokens.clone()),
            asked_generation: Histogram::new(tokens.clone()),
            n: Histogram::new(CHOICES),
            max_tokens: Histogram::new(tokens.clone()),
            first_token: Histogram::new(TTFT),
            inter_token: Histogram::new(TOKEN_TIME),
            per_token: Histogram::new(TOKEN_TIME),
            whole: phase(),
            queue: phase(),
            inference: phase(),
            prefill: phase(),
            decode: phase(),
            preempted: Histogram::new(PREEMPTIONS),
            computed: Histogram::new(tokens),
        }
    }

    /// A request was taken that asks for `n` answers to each prompt, `choices` in all.
    pub fn asked(&mut self, n: u32, max_tokens: Option<u32>, choices: usize) {
        (0..choices / n as usize).for_each(|_| self.n.observe(f64::from(n)));
        if let Some(max_tokens) = max_tokens {
            (0..choices).for_each(|_| self.max_tokens.observe(f64::from(max_tokens)));
        }
    }

    pub fn happened(&mut self, line: &mut Timeline, what: What, at: Time) {
        match what {
            What::Admitted { cached_tokens } => {
                line.admitted = at;
                line.cached = cached_tokens;
            }
            What::FirstToken => {
                line.first_token = at;
                line.last_token = at;
                self.prompt_tokens += u64::from(line.prompt);
                self.cached_tokens += u64::from(line.cached);
                self.generation_tokens += 1;
                self.first_token.observe(at - line.arrived);
            }
            What::Token => {
                self.generation_tokens += 1;
                self.inter_token.observe(at - line.last_token);
                line.last_token = at;
            }
            What::Preempted => line.preemptions += 1,
            What::Finished => {}
        }
    }

    pub fn finished(&mut self, line: &Timeline, at: Time, reason: &str) {
        *if reason == "stop" { &mut self.stopped } else { &mut self.cut } += 1;
        let decode = at - line.first_token;
        self.prompt.observe(f64::from(line.prompt));
        self.generation.observe(f64::from(line.output));
        self.asked_generation.observe(f64::from(line.output));
        self.per_token.observe(decode / f64::from(line.output.saturating_sub(1).max(1)));
        self.whole.observe(at - line.arrived);
        self.queue.observe(line.admitted - line.arrived);
        self.inference.observe(at - line.admitted);
        self.prefill.observe(line.first_token - line.admitted);
        self.decode.observe(decode);
        self.preempted.observe(f64::from(line.preemptions));
        self.computed.observe(f64::from(line.prompt - line.cached));
    }

    /// The page, without what only the HTTP side knows.
    pub fn page(&self, gauges: &Gauges) -> String {
        let mut page =
            Page { text: String::with_capacity(48 * 1024), model: &self.model, started: self.started };
        page.head(
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
        );
        let _ = writeln!(page.text, "process_start_time_seconds {:?}", self.started);
        self.gauges(gauges, &mut page);
        self.counters(gauges.counters, &mut page);
        for (name, help, histogram) in self.histograms() {
            page.histogram(name, help, histogram);
        }
        page.head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
        let _ = writeln!(page.text, "vllm:cache_config_info{{{}}} 1.0", self.cache_config);
        page.text
    }

    fn gauges(&self, gauges: &Gauges, page: &mut Page<'_>) {
        let waiting = gauges.waiting as f64;
        page.gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            &[("", gauges.running as f64)],
        );
        page.gauge(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            &[("", waiting)],
        );
        page.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. The reasons add up to vllm:num_requests_waiting.",
            &[(r#"reason="capacity""#, waiting), (r#"reason="deferred""#, 0.0)],
        );
        page.gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            &[("", gauges.kv_cache_usage)],
        );
    }

    fn counters(&self, counters: Counters, page: &mut Page<'_>) {
        let Counters { prefix_cache_queries, prefix_cache_hits, preemptions } = counters;
        let computed = self.prompt_tokens - self.cached_tokens;
        let queries = "Prefix cache queries, in terms of number of queried tokens.";
        page.counter("vllm:prefix_cache_queries", queries, &[("", prefix_cache_queries)]);
        let hits = "Prefix cache hits, in terms of number of cached tokens.";
        page.counter("vllm:prefix_cache_hits", hits, &[("", prefix_cache_hits)]);
        let external = "External prefix cache queries, in terms of number of queried tokens.";
        page.counter("vllm:external_prefix_cache_queries", external, &[("", 0)]);
        let external = "External prefix cache hits, in terms of number of cached tokens.";
        page.counter("vllm:external_prefix_cache_hits", external, &[("", 0)]);
        page.counter(
            "vllm:num_preemptions",
            "Cumulative number of preemption from the engine.",
            &[("", preemptions)],
        );
        page.counter(
            "vllm:prompt_tokens",
            "Number of prefill tokens processed.",
            &[("", self.prompt_tokens)],
        );
        page.counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            &[
                (r#"source="local_compute""#, computed),
                (r#"source="local_cache_hit""#, self.cached_tokens),
                (r#"source="external_kv_transfer""#, 0),
            ],
        );
        let cached = "Number of cached prompt tokens (local + external).";
        page.counter("vllm:prompt_tokens_cached", cached, &[("", self.cached_tokens)]);
        let generated = "Number of generation tokens processed.";
        page.counter("vllm:generation_tokens", generated, &[("", self.generation_tokens)]);
        page.counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            &[
                (r#"finished_reason="stop""#, self.stopped),
                (r#"finished_reason="length""#, self.cut),
                (r#"finished_reason="abort""#, 0),
                (r#"finished_reason="error""#, 0),
                (r#"finished_reason="repetition""#, 0),
            ],
        );
    }

    /// `vllm:admission_rejections_total`, which the HTTP side counts.
    pub fn rejections(model: &str, rejected: u64) -> String {
        let name = "vllm:admission_rejections_total";
        format!(
            "# HELP {name} Number of admission attempts rejected by a queue limit, by reason.\n# TYPE {name} counter\n\
             {name}{{model_name=\"{0}\",reason=\"max_num_queued_reqs\"}} {1:?}\n\
             {name}{{model_name=\"{0}\",reason=\"max_num_queued_tokens\"}} 0.0\n",
            escaped(model),
            rejected as f64
        )
    }

    #[rustfmt::skip]
    fn histograms(&self) -> [(&'static str, &'static str, &Histogram); 15] {
        [
            ("vllm:request_prompt_tokens", "Number of prefill tokens processed.", &self.prompt),
            ("vllm:request_generation_tokens", "Number of generation tokens processed.", &self.generation),
            ("vllm:request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", &self.asked_generation),
            ("vllm:request_params_n", "Histogram of the n request parameter.", &self.n),
            ("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", &self.max_tokens),
            ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", &self.first_token),
            ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", &self.inter_token),
            ("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", &self.per_token),
            ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", &self.whole),
            ("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &self.queue),
            ("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", &self.inference),
            ("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", &self.prefill),
            ("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", &self.decode),
            ("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.", &self.preempted),
            ("vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", &self.computed),
        ]
    }
}

/// The page being written.
struct Page<'a> {
    text: String,
    /// The value of `model_name`.
    model: &'a str,
    started: f64,
}

impl Page<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One value. `own` is its label beside the usual two, or nothing; labels are sorted by name, as Python's client does.
    fn value(&mut self, name: &str, own: &str, value: f64) {
        let model = self.model;
        let _ = match own {
            "" => write!(self.text, "{name}{{engine=\"0\",model_name=\"{model}\"}}"),
            own if own < "model_name" => {
                write!(self.text, "{name}{{engine=\"0\",{own},model_name=\"{model}\"}}")
            }
            own => write!(self.text, "{name}{{engine=\"0\",model_name=\"{model}\",{own}}}"),
        };
        let _ = writeln!(self.text, " {value:?}");
    }

    fn gauge(&mut self, name: &str, help: &str, values: &[(&str, f64)]) {
        self.head(name, "gauge", help);
        values.iter().for_each(|(own, value)| self.value(name, own, *value));
    }

    fn counter(&mut self, name: &str, help: &str, values: &[(&str, u64)]) {
        let total = format!("{name}_total");
        self.head(&total, "counter", help);
        values.iter().for_each(|(own, value)| self.value(&total, own, *value as f64));
        let created: Vec<(&str, f64)> = values.iter().map(|(own, _)| (*own, self.started)).collect();
        self.gauge(&format!("{name}_created"), help, &created);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut count = 0;
        let bounds = histogram.bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
        for (bound, more) in bounds.zip(&histogram.counts) {
            count += more;
            self.value(&bucket, &format!("le=\"{bound}\""), count as f64);
        }
        self.value(&format!("{name}_count"), "", count as f64);
        self.value(&format!("{name}_sum"), "", histogram.sum);
        self.gauge(&format!("{name}_created"), help, &[("", self.started)]);
    }
}

fn cache_config(config: &EngineConfig) -> String {
    let spec = &config.engine;
    let size_tokens = u64::from(spec.num_blocks) * u64::from(spec.block_size);
    let concurrency = size_tokens as f64 / f64::from(config.max_model_len());
    format!(
        r#"_block_size_resolved="True",block_size="{0}",cache_dtype="auto",effective_attention_block_size="{0}",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.92",hash_block_size="None",is_attention_free="False",kv_cache_max_concurrency="{concurrency:?}",kv_cache_size_tokens="{size_tokens}",num_cpu_blocks="None",num_gpu_blocks="{1}",num_gpu_blocks_override="{1}",prefix_caching_hash_algo="sha256",sliding_window="None",user_specified_block_size="True""#,
        spec.block_size, spec.num_blocks
    )
}

/// A label's value.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
