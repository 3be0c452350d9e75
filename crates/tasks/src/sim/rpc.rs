//! [`Channel`]: calls of gRPC clients in a world. The generated clients, and the coding of messages, are those of an ordinary
//! build; only the connection is replaced. A world sets its [`Network`].

use std::cell::RefCell;
use std::convert::Infallible;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::{Body as _, Frame};
use moontide_auth::Credentials;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use super::task::spawn;

/// Bytes before each message of a call: a flag for compression, which is off, and the length.
const PREFIX_BYTES: usize = 5;

/// What carries the calls of a world.
pub trait Network {
    /// Begins a call, and returns its number.
    fn begin(&self, address: &str, path: &str, reply: Reply) -> u64;
    /// The caller sends a message.
    fn message(&self, call: u64, message: Bytes);
    /// The caller sends no more messages.
    fn half_close(&self, call: u64);
    /// The caller waits no more, also after the end of the call.
    fn cancel(&self, call: u64);
}

// A failed world is left as it is, so nothing is dropped when its thread of the operating system ends: destructors of calls
// would wake threads of the world.
thread_local!(static NETWORK: ManuallyDrop<RefCell<Option<Rc<dyn Network>>>> =
    const { ManuallyDrop::new(RefCell::new(None)) });

/// Sets the network of the caller's world. A world has a thread of the operating system of its own.
pub fn set_network(network: Rc<dyn Network>) {
    let earlier = NETWORK.with(|slot| slot.replace(Some(network)));
    drop(earlier);
}

/// Drops the network of the caller's world.
pub(super) fn end_network() {
    let network = NETWORK.with(|slot| slot.take());
    drop(network);
}

fn network() -> Rc<dyn Network> {
    NETWORK.with(|slot| slot.borrow().clone()).expect("the world has set a network")
}

#[derive(Debug)]
enum ReplyEvent {
    Started,
    Message(Bytes),
    Ended(Status),
}

/// Where the network delivers what is answered to a call.
#[derive(Clone, Debug)]
pub struct Reply(UnboundedSender<ReplyEvent>);

impl Reply {
    /// The server has accepted the call.
    pub fn started(&self) {
        self.event(ReplyEvent::Started);
    }

    /// A message of the server arrives.
    pub fn message(&self, message: Bytes) {
        self.event(ReplyEvent::Message(message));
    }

    /// The call is over.
    pub fn end(&self, status: Status) {
        self.event(ReplyEvent::Ended(status));
    }

    fn event(&self, event: ReplyEvent) {
        // The caller may wait no more.
        let _ = self.0.send(event);
    }
}

/// Connection to a server.
#[derive(Clone, Debug)]
pub struct Channel {
    address: Arc<str>,
}

/// A connection that cannot be made: none, because each call finds out by itself.
#[derive(Debug, thiserror::Error)]
#[error("no connection")]
pub struct ConnectError(());

/// Connects.
///
/// # Errors
/// Never.
pub async fn connect(
    address: &str,
    _timeout: Duration,
    _window_bytes: u32,
    _credentials: Option<&Arc<Credentials>>,
) -> Result<Channel, ConnectError> {
    Ok(Channel { address: address.into() })
}

/// Cancels a call when it is dropped.
#[derive(Debug)]
struct CallGuard(u64);

impl Drop for CallGuard {
    fn drop(&mut self) {
        if moontide_rt::sim::is_inside() {
            network().cancel(self.0);
        }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<ReplyBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ReplyBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let address = Arc::clone(&self.address);
        Box::pin(async move {
            let (sender, mut events) = unbounded_channel();
            let call = network().begin(&address, request.uri().path(), Reply(sender));
            let guard = CallGuard(call);
            spawn(send_messages(call, request.into_body()));
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            let mut is_over = false;
            match events.recv().await {
                Some(ReplyEvent::Started) => {}
                Some(ReplyEvent::Ended(status)) => {
                    status.add_header(&mut headers).expect("a status of the world is valid");
                    is_over = true;
                }
                Some(ReplyEvent::Message(_)) => unreachable!("a call is started before its first message"),
                None => unreachable!("the guard keeps the call"),
            }
            let mut response = Response::new(ReplyBody { events, is_over, _guard: guard });
            *response.headers_mut() = headers;
            Ok(response)
        })
    }
}

/// Gives the messages of a request to the network, one by one.
async fn send_messages(call: u64, mut body: Body) {
    let mut buffer = BytesMut::new();
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let Some(Ok(frame)) = frame else { break };
        let Ok(data) = frame.into_data() else { continue };
        buffer.put(data);
        while let Some(prefix) = buffer.first_chunk::<PREFIX_BYTES>() {
            let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            if buffer.len() < PREFIX_BYTES + len {
                break;
            }
            buffer.advance(PREFIX_BYTES);
            network().message(call, buffer.split_to(len).freeze());
        }
    }
    network().half_close(call);
}

/// Body of a response.
#[derive(Debug)]
pub struct ReplyBody {
    events: UnboundedReceiver<ReplyEvent>,
    is_over: bool,
    _guard: CallGuard,
}

impl http_body::Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let frame = match std::task::ready!(self.events.poll_recv(context)) {
            Some(ReplyEvent::Started) => unreachable!("a call starts once"),
            Some(ReplyEvent::Message(message)) => {
                let mut data = BytesMut::with_capacity(PREFIX_BYTES + message.len());
                data.put_u8(0);
                data.put_u32(u32::try_from(message.len()).expect("a message is below 4 GiB"));
                data.put(message);
                Frame::data(data.freeze())
            }
            Some(ReplyEvent::Ended(status)) => {
                self.is_over = true;
                let mut trailers = HeaderMap::new();
                status.add_header(&mut trailers).expect("a status of the world is valid");
                Frame::trailers(trailers)
            }
            None => return Poll::Ready(None),
        };
        Poll::Ready(Some(Ok(frame)))
    }
}
