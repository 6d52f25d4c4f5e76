//! What every request passes through, outermost first, each layer with its reason. Limits that end at the response head
//! (tower's own) are not among them: a stream has only begun there.

use std::any::Any;
use std::convert::Infallible;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;

use futures_util::FutureExt;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use tower::{Service, ServiceBuilder, service_fn};

use super::account::{AccountLayer, Accounted, Failed};
use super::error::ProxyError;
use super::forward::{Inbound, forward};
use super::headers::REQUEST_ID;
use super::relay::ResponseBody;
use super::{Client, Proxy};
use crate::lifecycle::Phase;

/// Builds the stack; cloned for each connection. What leaves it goes through [`rendered`].
pub fn stack(
    proxy: Arc<Proxy>,
) -> impl Service<
    (Request<Incoming>, Arc<Client>),
    Response = Response<Accounted>,
    Error = Failed,
    Future = impl Future<Output = Result<Response<Accounted>, Failed>> + Send,
> + Clone {
    ServiceBuilder::new()
        // Outermost, so that all is counted, and before errors are rendered, so that each is counted by its kind.
        .layer(AccountLayer { proxy: proxy.clone() })
        // Next to the work: a bug in one request is that request's error, and takes no other request of its connection along.
        .map_future(catch)
        .service(service_fn(move |inbound| until_cut(proxy.clone(), inbound)))
}

/// What waits when the drain cuts, for its body, a place or a worker, is told so.
fn until_cut(proxy: Arc<Proxy>, inbound: Inbound) -> impl Future<Output = Answered> + Send {
    let mut cut = inbound.client.cut();
    let mut answered = Box::pin(forward(proxy, inbound));
    poll_fn(move |cx| match answered.as_mut().poll(cx) {
        Poll::Pending => cut.poll(cx).map(|()| Err(ProxyError::Leaving)),
        answered => answered,
    })
}

type Answered = Result<Response<ResponseBody>, ProxyError>;

fn catch<F: Future<Output = Answered>>(answer: F) -> impl Future<Output = Answered> {
    AssertUnwindSafe(answer).catch_unwind().map(|caught| caught.unwrap_or_else(panicked))
}

fn panicked(panic: Box<dyn Any + Send>) -> Answered {
    // The message may quote the request, so it is not logged; the hook has printed where it was.
    drop(panic);
    Err(ProxyError::Internal)
}

/// Turns whatever went wrong into a response, at this one place: an error handed to hyper would close the connection
/// without a word.
pub fn rendered(
    answer: Result<Response<Accounted>, Failed>,
    proxy: &Proxy,
    version: Version,
) -> Result<Response<Accounted>, Infallible> {
    let mut response = answer.unwrap_or_else(|Failed { error, request_id }| {
        error.log(&proxy.complaints);
        let mut response = error.render();
        if let Some(id) = request_id {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        if error.ends_connection() && version < Version::HTTP_2 {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.map(Accounted::whole)
    });
    // So clients go elsewhere by and by, each between two requests, before connections are closed.
    let leaves =
        proxy.drain.phase() >= Phase::Leaving && response.status() != StatusCode::SWITCHING_PROTOCOLS;
    if leaves && version < Version::HTTP_2 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
