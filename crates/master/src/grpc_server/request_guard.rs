//! [`RequestGuard`]: limits of the requests of all gRPC connections, which the transport does not have.
//!
//! - **Memory.** Messages are counted until their call is over: large ones with their length, before their bytes are received;
//!   small ones byte by byte, so that no peer can use up the limit with less than these bytes. Each kind has at most
//!   [`BODIES_BYTES_MAX`] in all calls, and half of it in those of one address. Beyond that a call is refused as busy.
//! - **Time.** A message must be complete [`MESSAGE_TIME_MAX`] after its beginning, however its bytes are spread.
//! - **Use.** The first call of a connection lets it keep its place at the listener.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use moontide_tasks::{BodyBytes, ConnectionInfo};
use moontide_types::ErrorCode;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use super::{MESSAGE_BYTES_MAX, status};

/// Maximum memory of all large messages that are being received or handled, and of all small ones. As in the frame server: 32
/// largest requests keep all cores busy.
const BODIES_BYTES_MAX: usize = 512 << 20;

/// Longest message that counts as small: hundreds of keys.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// Time from the beginning of a call, or of a message on a stream, to its last byte. The largest request then needs 1.6 MB/s.
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(10);

/// Bytes before a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Path of the only call with a stream of requests.
const STREAM_PATH: &str = "/moontide.v1.MasterNodes/Session";

/// Memory of the messages of all connections.
#[derive(Debug, Default)]
pub(super) struct BodyMemory {
    used: BodyBytes,
}

/// A gRPC service with guarded requests.
#[derive(Clone, Debug)]
pub(super) struct RequestGuard<S> {
    inner: S,
    memory: Arc<BodyMemory>,
}

impl<S> RequestGuard<S> {
    pub(super) fn new(inner: S, memory: &Arc<BodyMemory>) -> RequestGuard<S> {
        RequestGuard { inner, memory: Arc::clone(memory) }
    }
}

impl<S: NamedService> NamedService for RequestGuard<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for RequestGuard<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Unpin,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = GuardedCall<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let connection = request.extensions().get::<ConnectionInfo>().cloned();
        if let Some(connection) = &connection {
            connection.called();
        }
        let memory = Arc::clone(&self.memory);
        let charge = Arc::new(Charge { memory, connection, own: BodyBytes::default() });
        let is_stream = request.uri().path() == STREAM_PATH;
        // The messages of a stream are counted one by one.
        let of_call = (!is_stream).then(|| Arc::clone(&charge));
        let request = request.map(|inner| {
            Body::new(GuardedBody {
                inner,
                charge,
                is_stream,
                started: Instant::now(),
                timer: None,
                messages: MessageParser::default(),
            })
        });
        GuardedCall { inner: self.inner.call(request), _charge: of_call }
    }
}

/// A call. Its message is counted until the response begins.
#[derive(Debug)]
pub(super) struct GuardedCall<F> {
    inner: F,
    _charge: Option<Arc<Charge>>,
}

impl<F: Future + Unpin> Future for GuardedCall<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        Pin::new(&mut self.inner).poll(cx)
    }
}

/// Body of a request.
struct GuardedBody {
    inner: Body,
    charge: Arc<Charge>,
    is_stream: bool,
    /// Beginning of the call, or of the current message of a stream.
    started: Instant,
    /// Created when the server has to wait for bytes.
    timer: Option<Pin<Box<Sleep>>>,
    messages: MessageParser,
}

impl GuardedBody {
    /// Counts the messages in these bytes.
    fn count(&mut self, bytes: &[u8]) -> Result<(), Status> {
        let charge = &self.charge;
        self.messages.take(bytes, |part| {
            let fits = match part {
                Part::Begin { len } if len <= SMALL_BYTES_MAX => true,
                // The transport refuses a message that is too long, without memory for it.
                Part::Begin { len } => len > MESSAGE_BYTES_MAX || charge.add(len, |of| &of.large),
                Part::Bytes { count, of } => of > SMALL_BYTES_MAX || charge.add(count, |of| &of.small),
            };
            match fits {
                true => Ok(()),
                false => Err(status(ErrorCode::Busy, "too many bytes of requests are in memory")),
            }
        })
    }

    /// Whether a stream is between two messages.
    fn is_between_messages(&self) -> bool {
        self.is_stream && !self.messages.is_within_message()
    }
}

impl hyper::body::Body for GuardedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.is_between_messages() {
            // The messages before have been applied.
            self.charge.clear();
        }
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(bytes) = frame.data_ref() {
                    if self.is_between_messages() {
                        (self.started, self.timer) = (Instant::now(), None);
                    }
                    if let Err(status) = self.count(bytes) {
                        return Poll::Ready(Some(Err(status)));
                    }
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(end) => Poll::Ready(end),
            // A node may have nothing to say.
            Poll::Pending if self.is_between_messages() => Poll::Pending,
            Poll::Pending => {
                let deadline = self.started + MESSAGE_TIME_MAX;
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
                match timer.as_mut().poll(cx) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(()) => Poll::Ready(Some(Err(status(
                        ErrorCode::DeadlineExceeded,
                        "the request was not complete within its time limit",
                    )))),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Bytes of one call, counted for all calls and for its address. Dropping it ends both.
#[derive(Debug)]
struct Charge {
    memory: Arc<BodyMemory>,
    connection: Option<ConnectionInfo>,
    own: BodyBytes,
}

impl Charge {
    /// Counts bytes of one kind, if that exceeds no limit. All orderings are Relaxed: no other data depends on the sums.
    fn add(&self, bytes: usize, kind: fn(&BodyBytes) -> &AtomicUsize) -> bool {
        let used = kind(&self.memory.used);
        if !add_within(used, bytes, BODIES_BYTES_MAX) {
            return false;
        }
        if let Some(connection) = &self.connection
            && !add_within(kind(connection.place().body_bytes_of_address()), bytes, BODIES_BYTES_MAX / 2)
        {
            used.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        kind(&self.own).fetch_add(bytes, Ordering::Relaxed);
        true
    }

    fn clear(&self) {
        for kind in
            [|of: &BodyBytes| &of.small, |of: &BodyBytes| &of.large] as [fn(&BodyBytes) -> &AtomicUsize; 2]
        {
            let bytes = kind(&self.own).swap(0, Ordering::Relaxed);
            if bytes == 0 {
                continue;
            }
            kind(&self.memory.used).fetch_sub(bytes, Ordering::Relaxed);
            if let Some(connection) = &self.connection {
                kind(connection.place().body_bytes_of_address()).fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Adds to a sum, unless it would exceed the limit. Others may see the excess for a moment, and are refused then.
fn add_within(sum: &AtomicUsize, bytes: usize, max: usize) -> bool {
    let fits = sum.fetch_add(bytes, Ordering::Relaxed) + bytes <= max;
    if !fits {
        sum.fetch_sub(bytes, Ordering::Relaxed);
    }
    fits
}

/// A part of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// A message of this length begins.
    Begin { len: usize },
    /// Bytes of a message of a length.
    Bytes { count: usize, of: usize },
}

/// Finds the messages in the bytes of a body.
#[derive(Debug, Default)]
struct MessageParser {
    prefix: [u8; PREFIX_BYTES],
    /// Bytes of the prefix that have arrived.
    prefix_len: usize,
    /// Length of the current message, and its missing bytes.
    len: usize,
    missing: usize,
}

impl MessageParser {
    /// Takes the next bytes. Calls `part` with each part of them, and fails with its error.
    fn take<E>(&mut self, mut bytes: &[u8], mut part: impl FnMut(Part) -> Result<(), E>) -> Result<(), E> {
        while !bytes.is_empty() {
            if self.missing > 0 {
                let count = self.missing.min(bytes.len());
                self.missing -= count;
                bytes = &bytes[count..];
                part(Part::Bytes { count, of: self.len })?;
                continue;
            }
            let len = (PREFIX_BYTES - self.prefix_len).min(bytes.len());
            self.prefix[self.prefix_len..self.prefix_len + len].copy_from_slice(&bytes[..len]);
            self.prefix_len += len;
            bytes = &bytes[len..];
            if self.prefix_len == PREFIX_BYTES {
                let [_, length @ ..] = self.prefix;
                self.len = u32::from_be_bytes(length) as usize;
                (self.missing, self.prefix_len) = (self.len, 0);
                part(Part::Begin { len: self.len })?;
            }
        }
        Ok(())
    }

    /// Whether a message has begun and is not complete.
    fn is_within_message(&self) -> bool {
        self.missing > 0 || self.prefix_len > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(parser: &mut MessageParser, bytes: &[u8]) -> Vec<usize> {
        let mut lengths = vec![];
        let taken = parser.take(bytes, |part| {
            if let Part::Begin { len } = part {
                lengths.push(len);
            }
            Ok::<(), Infallible>(())
        });
        taken.unwrap();
        lengths
    }

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let message = |len: usize| [&[0][..], &(len as u32).to_be_bytes(), &vec![7; len][..]].concat();
        let bytes = [message(3), message(0), message(300), message(1)].concat();
        for cut in 1..bytes.len() {
            let mut parser = MessageParser::default();
            let found: Vec<usize> = bytes.chunks(cut).flat_map(|chunk| lengths(&mut parser, chunk)).collect();
            assert_eq!(found, [3, 0, 300, 1], "cut into {cut} bytes");
            assert!(!parser.is_within_message());
        }
        let mut parser = MessageParser::default();
        assert!(lengths(&mut parser, &bytes[..3]).is_empty());
        assert!(parser.is_within_message());
        assert_eq!(lengths(&mut parser, &bytes[3..7]), [3]);
        assert!(parser.is_within_message());
    }

    #[test]
    fn memory_of_messages_is_limited_and_returned() {
        let memory = Arc::<BodyMemory>::default();
        let charge = || Charge { memory: Arc::clone(&memory), connection: None, own: BodyBytes::default() };
        let (first, second) = (charge(), charge());
        let large = |charge: &Charge, bytes| charge.add(bytes, |of| &of.large);
        assert!(large(&first, BODIES_BYTES_MAX - 10) && large(&second, 10));
        assert!(!large(&second, 1));
        assert!(second.add(1, |of| &of.small), "small messages have memory of their own");
        second.clear();
        assert!(large(&second, 5));
        drop(first);
        assert!(large(&second, BODIES_BYTES_MAX - 5) && !large(&second, 1));
        drop(second);
        let used = [&memory.used.small, &memory.used.large].map(|used| used.load(Ordering::Relaxed));
        assert_eq!(used, [0, 0]);
    }
}
