//! The way back: a worker's answer streams through as it comes, and what passes is watched. Nothing is held back: pieces are joined
//! only if they are there at once. A slow client slows the worker.
//!
//! Where an answer breaks off, a stream of events ends with one more event, which says so and makes client libraries raise;
//! any other body, or a stream that has told its end, is cut, so that its length or its missing end says so. So does what still
//! runs when this process ends. Never is an end made up.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use thiserror::Error;

use super::error::{Abrupt, stream_event};
use super::hide_usage::WithoutUsage;
use super::patience::{GivenUp, Patience};
use super::watch::Watch;
use crate::core::prompt::Endpoint;
use crate::fleet::answer::Answer;
use crate::fleet::connection::Fault;
use crate::fleet::health::Event;
use crate::metrics::FailureKind;

/// Why an answer was cut.
#[derive(Debug, Error)]
pub enum Cut {
    #[error("the worker broke off: {0}")]
    Broken(#[from] Fault),
    #[error(transparent)]
    GivenUp(#[from] GivenUp),
}

impl Cut {
    pub fn abrupt(&self) -> Abrupt {
        match self {
            Cut::GivenUp(GivenUp::Leaving) => Abrupt::Leaving,
            Cut::GivenUp(GivenUp::Late) => Abrupt::Late,
            Cut::GivenUp(_) | Cut::Broken(_) => Abrupt::Broken,
        }
    }
}

/// The body of a response to a client.
pub enum ResponseBody {
    /// Made here.
    Whole(Full<Bytes>),
    /// Made by a worker.
    Relayed(Box<Relay>),
    /// The same, without what the client did not ask for.
    WithoutUsage(Box<WithoutUsage>),
}

impl ResponseBody {
    pub fn whole(bytes: Bytes) -> ResponseBody {
        ResponseBody::Whole(Full::new(bytes))
    }

    /// What is known of the answer, if a worker made it.
    pub fn watch(&self) -> Option<&Watch> {
        match self {
            ResponseBody::Whole(_) => None,
            ResponseBody::Relayed(relay) => Some(relay.watch()),
            ResponseBody::WithoutUsage(body) => Some(body.watch()),
        }
    }

    /// Why the answer had an end that is not the one that was asked for, if so.
    pub fn failure(&self) -> Option<Abrupt> {
        match self {
            ResponseBody::Whole(_) => None,
            ResponseBody::Relayed(relay) => relay.failure(),
            ResponseBody::WithoutUsage(body) => body.failure(),
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.get_mut() {
            ResponseBody::Whole(full) => Pin::new(full)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(|never: Infallible| match never {}))),
            ResponseBody::Relayed(relay) => relay.poll_frame(cx),
            ResponseBody::WithoutUsage(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::Whole(full) => full.is_end_stream(),
            ResponseBody::Relayed(relay) => relay.is_end_stream(),
            ResponseBody::WithoutUsage(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(full) => full.size_hint(),
            ResponseBody::Relayed(relay) => relay.answer.size_hint(),
            ResponseBody::WithoutUsage(_) => SizeHint::default(),
        }
    }
}

/// One answer on its way. Dropped before its end, it closes the connection to the worker and gives the place back.
pub struct Relay {
    answer: Answer,
    patience: Patience,
    watch: Watch,
    /// For which dialect an event that ends the stream is made; `None` if none can be added.
    dialect: Option<Dialect>,
    broken: Option<Broken>,
    failed: Option<Abrupt>,
}

/// How a stream speaks of errors.
pub struct Dialect(pub Option<Endpoint>);

/// A broken answer, step by step.
enum Broken {
    /// To be cut, once what came before is on its way.
    Cut(Cut),
    /// All has been said.
    Said,
}

impl Relay {
    /// `dialect` is for streams of events whose length is open.
    pub fn new(answer: Answer, patience: Patience, mut watch: Watch, dialect: Option<Dialect>) -> Relay {
        if answer.is_over() {
            watch.finish();
        }
        let dialect = dialect.filter(|_| answer.size_hint().exact().is_none());
        Relay { answer, patience, watch, dialect, broken: None, failed: None }
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    pub(super) fn failure(&self) -> Option<Abrupt> {
        self.failed
    }

    pub(super) fn is_end_stream(&self) -> bool {
        match self.broken {
            Some(Broken::Said) => true,
            Some(Broken::Cut(_)) => false,
            None => self.answer.is_end_stream(),
        }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.broken.take() {
            Some(Broken::Cut(why)) => return Poll::Ready(Some(Err(why))),
            Some(Broken::Said) => {
                self.broken = Some(Broken::Said);
                return Poll::Ready(None);
            }
            None => {}
        }
        match Pin::new(&mut self.answer).poll_frame(cx) {
            Poll::Pending => {
                let why = ready!(self.patience.poll_end(cx));
                self.give_up(why, cx)
            }
            Poll::Ready(Some(Err(error))) => {
                self.watch.failed(FailureKind::InBody, &error, Event::Broke);
                self.break_off(error.into(), cx)
            }
            Poll::Ready(frame) => {
                // The end is always told.
                if !self.answer.is_end_stream()
                    && let Some(why) = self.patience.is_over()
                {
                    return self.give_up(why, cx);
                }
                if let Some(Ok(frame)) = &frame
                    && let Some(data) = frame.data_ref()
                {
                    self.patience.heard.renew();
                    if self.watch.saw(data) {
                        self.failed = Some(Abrupt::Broken);
                    }
                }
                if self.answer.is_over() {
                    self.watch.finish();
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Cut::from)))
            }
        }
    }

    fn give_up(&mut self, why: GivenUp, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        self.answer.close();
        match why {
            // How long an answer may take says nothing of the worker, which may have been waiting for the client.
            GivenUp::Leaving | GivenUp::Late => self.watch.cut(),
            GivenUp::Lost | GivenUp::Silent => self.watch.failed(FailureKind::Silent, &why, Event::Broke),
        }
        self.break_off(why.into(), cx)
    }

    /// Says in the stream that it ends here, or has it cut.
    fn break_off(&mut self, why: Cut, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let abrupt = why.abrupt();
        self.failed = Some(abrupt);
        if let Some(Dialect(endpoint)) = &self.dialect
            && !self.watch.is_told()
        {
            self.broken = Some(Broken::Said);
            let event = stream_event(*endpoint, self.watch.lead(), abrupt);
            return Poll::Ready(Some(Ok(Frame::data(event))));
        }
        self.broken = Some(Broken::Cut(why));
        // hyper drops what it has not yet written when a body fails: let it write first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
