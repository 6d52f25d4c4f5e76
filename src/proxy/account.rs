//! Counts each request from its arrival to the last byte of its answer, and says how it ended. A request ends when its body
//! ends: what is measured at the head of a stream is wrong.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower::{Layer, Service};

use super::error::{Abrupt, ProxyError};
use super::forward::Inbound;
use super::note::Note;
use super::relay::{Cut, ResponseBody};
use super::route::Route;
use super::{Busy, Client, Proxy};
use crate::lifecycle::Phase;
use crate::metrics::Outcome;

/// Counts a request for as long as it lives. If nobody says otherwise, its client has left, or it was cut with all that still ran.
pub struct Account {
    route: Route,
    /// `None` until it is known.
    outcome: Option<Outcome>,
    /// Time spent in the polls of the request and its answer: all but the waits.
    worked: Duration,
    note: Note,
    proxy: Arc<Proxy>,
}

impl Account {
    fn open(proxy: Arc<Proxy>, route: Route, headers: &HeaderMap) -> Account {
        proxy.metrics.in_flight.inc();
        let mode = proxy.config.load().mode;
        let note = proxy.records.begin(route.label(), mode, headers);
        Account { route, outcome: None, worked: Duration::ZERO, note, proxy }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let unfinished = || match self.proxy.drain.phase() {
            Phase::Cut => Outcome::Cut,
            Phase::Serving | Phase::Leaving | Phase::Draining => Outcome::ClientGone,
        };
        let outcome = self.outcome.unwrap_or_else(unfinished);
        self.proxy.metrics.in_flight.dec();
        self.proxy.metrics.requests.inc(self.route.label(), outcome, self.note.mode());
        self.proxy.records.end(&self.note, outcome);
    }
}

fn outcome_of(status: StatusCode) -> Outcome {
    match status.as_u16() {
        ..400 => Outcome::Ok,
        400..500 => Outcome::ClientError,
        _ => Outcome::WorkerError,
    }
}

/// A response body that keeps the account open until its end.
pub struct Accounted {
    body: ResponseBody,
    status: StatusCode,
    /// `None` once the end has been told, or if the body was made here.
    account: Option<Account>,
    busy: Option<Busy>,
}

impl Accounted {
    pub fn whole(body: ResponseBody) -> Accounted {
        Accounted { body, status: StatusCode::OK, account: None, busy: None }
    }

    /// Keeps the client busy until its end.
    pub fn keeping(self, busy: Busy) -> Accounted {
        if let Some(handed) = &busy.handed {
            handed.stands();
        }
        Accounted { busy: Some(busy), ..self }
    }

    fn end(&mut self, outcome: Outcome) {
        let Some(mut account) = self.account.take() else { return };
        account.outcome = Some(outcome);
        if let Some(watch) = self.body.watch() {
            let worked = account.worked + watch.read_apart();
            account.proxy.metrics.overhead(account.note.mode()).observe(worked.as_secs_f64());
        }
    }
}

impl Body for Accounted {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let begun = Instant::now();
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Some(account) = &mut self.account {
            account.worked += begun.elapsed();
        }
        if let Some(handed) = self.busy.as_ref().and_then(|busy| busy.handed.as_ref()) {
            handed.goes_on();
            if polled.is_ready() {
                handed.stands();
            }
        }
        let polled = ready!(polled);
        match &polled {
            Some(Err(cut)) => self.end(cut.abrupt().outcome()),
            // Nobody asks for more after the last piece, or after trailers.
            Some(Ok(frame)) if frame.is_data() && !self.body.is_end_stream() => {}
            Some(Ok(_)) | None => {
                let failed = self.body.failure().map(Abrupt::outcome);
                let outcome = failed.unwrap_or(outcome_of(self.status));
                self.end(outcome);
            }
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Why a request has no answer, and by which id it is known.
pub struct Failed {
    pub error: ProxyError,
    pub request_id: Option<HeaderValue>,
}

/// Opens an account for each request and closes it by its answer or error.
#[derive(Clone)]
pub struct AccountLayer {
    pub proxy: Arc<Proxy>,
}

impl<S> Layer<S> for AccountLayer {
    type Service = AccountService<S>;

    fn layer(&self, inner: S) -> AccountService<S> {
        AccountService { inner, proxy: self.proxy.clone() }
    }
}

/// See [`AccountLayer`].
#[derive(Clone)]
pub struct AccountService<S> {
    inner: S,
    proxy: Arc<Proxy>,
}

impl<S> Service<(Request<Incoming>, Arc<Client>)> for AccountService<S>
where
    S: Service<Inbound, Response = Response<ResponseBody>, Error = ProxyError>,
{
    type Response = Response<Accounted>;
    type Error = Failed;
    type Future = AccountFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        self.inner.poll_ready(cx).map_err(|error| Failed { error, request_id: None })
    }

    fn call(&mut self, (request, client): (Request<Incoming>, Arc<Client>)) -> Self::Future {
        let route = Route::of(request.method(), request.uri().path());
        let account = Account::open(self.proxy.clone(), route, request.headers());
        let inbound = Inbound { request, client, route, note: account.note.clone(), arrived: Instant::now() };
        AccountFuture { inner: self.inner.call(inbound), account: Some(account) }
    }
}

pin_project! {
    /// See [`AccountLayer`].
    pub struct AccountFuture<F> {
        #[pin]
        inner: F,
        account: Option<Account>,
    }
}

impl<F: Future<Output = Result<Response<ResponseBody>, ProxyError>>> Future for AccountFuture<F> {
    type Output = Result<Response<Accounted>, Failed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let begun = Instant::now();
        let answered = this.inner.poll(cx);
        if let Some(account) = this.account.as_mut() {
            account.worked += begun.elapsed();
        }
        let answered = ready!(answered);
        let mut account = this.account.take();
        Poll::Ready(match answered {
            Ok(response) => {
                let status = response.status();
                Ok(response.map(|body| {
                    let ended = body.is_end_stream();
                    let mut body = Accounted { body, status, account, busy: None };
                    if ended {
                        body.end(outcome_of(status));
                    }
                    body
                }))
            }
            Err(error) => {
                let mut request_id = None;
                if let Some(account) = &mut account {
                    account.outcome = Some(error.outcome());
                    account.note.answered(error.status());
                    request_id = account.note.id().cloned();
                }
                Err(Failed { error, request_id })
            }
        })
    }
}
