//! Workers found through Kubernetes' EndpointSlices: pods come, go, fall ill, and take over each other's addresses, while the API
//! server is there, away, silent or forgetful. Runs against a small fake, and where `tests/kubernetes/run.sh` has built one, against a
//! real API server with its own rights and rules.

mod cases;
mod churn;
mod cluster;
mod deploy;
mod fake;
mod footprint;
mod link;
mod log;
mod real;
mod roll;
#[path = "../roll/run.rs"]
mod run;
mod trouble;
