//! Reads what an operator sends, within limits: its size, the room for all bodies that the process holds, and time. A stall is
//! judged as a client's.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use hyper::body::Incoming;
use tokio::time::timeout;

use super::answer::{Page, text};
use crate::proxy::Proxy;
use crate::proxy::body::{self, Caps, Held};

/// For a body to come, whole.
const TIME: Duration = Duration::from_secs(60);

/// The body, and its count among all that are held.
///
/// # Errors
/// With the answer for who sent it.
pub(super) async fn read(
    proxy: &Proxy,
    request: Request<Incoming>,
    limit: usize,
) -> Result<(Bytes, Held), Page> {
    let caps = {
        let config = proxy.config.load();
        Caps { each: limit, all: config.limits.bodies, idle: config.timeouts.client_body }
    };
    let waits = request.headers().contains_key(header::EXPECT);
    let mut held = Held::none(&proxy.metrics.body_bytes);
    match timeout(TIME, body::read(request.into_body(), waits, &caps, &mut held)).await {
        Ok(Ok(bytes)) => Ok((bytes, held)),
        Ok(Err(error)) => Err(text(error.status(), &format!("{error}\n"))),
        Err(_) => {
            let said = format!("the body did not come within {} s\n", TIME.as_secs());
            Err(text(StatusCode::REQUEST_TIMEOUT, &said))
        }
    }
}
