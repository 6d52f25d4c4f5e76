//! The command line of `warmroute engine`: the few settings that one changes by hand. All others keep their defaults.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;

use super::config::{ApiKey, EngineConfig};

/// Simulated vLLM workers on neighbouring ports.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// How many workers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub workers: u16,
    /// Port of the first worker; the next ones follow. 0: any free ports
    #[arg(long, default_value_t = 8101)]
    pub port: u16,
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// Name of the served model
    #[arg(long)]
    pub model: Option<String>,
    /// KV blocks of each worker, as vLLM's num_gpu_blocks
    #[arg(long)]
    pub blocks: Option<u32>,
    /// Tokens of a KV block
    #[arg(long)]
    pub block_size: Option<u32>,
    /// Speed of each worker as a share of the usual; the last one counts for the rest
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub speeds: Vec<f64>,
    /// Longest prompt and answer together, in tokens; what the KV cache holds if not given
    #[arg(long)]
    pub max_model_len: Option<u32>,
    /// Model seconds in a real second
    #[arg(long)]
    pub time_scale: Option<f64>,
    /// Tell cached tokens in usage
    #[arg(long)]
    pub enable_prompt_tokens_details: bool,
    /// Want this key as a bearer token under /v1
    #[arg(long)]
    pub api_key: Option<String>,
    /// Answer 503 beyond so many requests in flight
    #[arg(long)]
    pub max_num_queued_reqs: Option<usize>,
}

impl EngineArgs {
    /// The workers' settings. An error if the ports run out.
    pub fn configs(&self) -> Result<Vec<EngineConfig>, String> {
        let defaults = EngineConfig::default();
        let mut engine = defaults.engine.clone();
        engine.num_blocks = self.blocks.unwrap_or(engine.num_blocks);
        engine.block_size = self.block_size.unwrap_or(engine.block_size);
        if self.speeds.iter().any(|speed| !(*speed > 0.0 && speed.is_finite())) {
            return Err("`--speeds` must be numbers above 0".to_owned());
        }
        let config = EngineConfig {
            model: self.model.clone().unwrap_or(defaults.model),
            max_model_len: self.max_model_len,
            api_key: self.api_key.as_ref().map(ApiKey::new),
            enable_prompt_tokens_details: self.enable_prompt_tokens_details,
            max_num_queued_reqs: self.max_num_queued_reqs,
            time_scale: self.time_scale.unwrap_or(defaults.time_scale),
            engine,
            ..EngineConfig::default()
        };
        let port = |worker: u16| match self.port {
            0 => Ok(0),
            first => first.checked_add(worker).ok_or_else(|| {
                format!("`--port` {first} and `--workers` {} go beyond port 65535", self.workers)
            }),
        };
        (0..self.workers)
            .map(|worker| {
                let speed = self.speeds.get(usize::from(worker)).or(self.speeds.last()).copied();
                let engine = config.engine.clone().at_speed(speed.unwrap_or(1.0));
                let listen = SocketAddr::new(self.host, port(worker)?);
                Ok(EngineConfig { listen, engine, ..config.clone() })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn configs(args: &[&str]) -> Result<Vec<EngineConfig>, String> {
        Cli::try_parse_from([&["engine"], args].concat()).map_err(|error| error.to_string())?.engine.configs()
    }

    #[test]
    fn workers_get_neighbouring_ports() {
        let configs =
            configs(&["--workers", "3", "--port", "9000", "--blocks", "100", "--api-key", "k"]).unwrap();
        assert_eq!(configs.iter().map(|config| config.listen.port()).collect::<Vec<_>>(), [9000, 9001, 9002]);
        assert!(configs.iter().all(|config| config.engine.num_blocks == 100 && config.check().is_ok()));
    }

    #[test]
    fn speeds_go_to_the_workers_in_turn() {
        use crate::engine::model::Timing;
        let configs = configs(&["--workers", "3", "--speeds", "1,0.5", "--block-size", "32"]).unwrap();
        let speed = |worker: usize| match &configs[worker].engine.timing {
            Timing::Chunked(timing) => timing.prefill_tokens_per_s,
            Timing::Serial(timing) => timing.prefill_tokens_per_s,
        };
        assert_eq!([speed(0), speed(1), speed(2)], [35_000.0, 17_500.0, 17_500.0]);
        assert!(configs.iter().all(|config| config.engine.block_size == 32));
        assert!(super::tests::configs(&["--speeds", "0"]).unwrap_err().contains("--speeds"));
    }

    #[test]
    fn ports_that_do_not_exist_are_refused() {
        assert!(configs(&["--workers", "3", "--port", "65534"]).unwrap_err().contains("`--port` 65534"));
        assert!(configs(&["--workers", "0"]).unwrap_err().contains("--workers"));
    }
}
