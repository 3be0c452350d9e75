//! [`Response`]: context, and the body of a successful call. All responses are converted through it.
//!
//! The context contains the error code of a call that failed as a whole. Then the rest of the message is not checked:
//! it is empty, and an empty body would violate the rules of most bodies.

use moontide_types::ErrorCode;

use super::bounded::Bounded;
use super::context::ResponseContext;
use super::{ConvertError, Wire};
use crate::v1;

/// Response of a call.
///
/// Invariant: the response has a body if and only if the context has no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response<'a, T> {
    context: ResponseContext<'a>,
    body: Option<T>,
}

impl<'a, T> Response<'a, T> {
    /// Creates the response of a successful call. Removes a code from the context.
    pub fn new(context: ResponseContext<'a>, body: T) -> Response<'a, T> {
        Response { context: ResponseContext { code: None, ..context }, body: Some(body) }
    }

    /// Creates the response of a call that failed as a whole.
    pub fn error(context: ResponseContext<'a>, code: ErrorCode) -> Response<'a, T> {
        Response { context: ResponseContext { code: Some(code), ..context }, body: None }
    }

    /// Returns the context.
    pub fn context(&self) -> &ResponseContext<'a> {
        &self.context
    }

    /// Returns the body; `None` if the call failed.
    pub fn body(&self) -> Option<&T> {
        self.body.as_ref()
    }

    /// Returns the body, or the context with the error code.
    pub fn into_result(self) -> Result<T, ResponseContext<'a>> {
        self.body.ok_or(self.context)
    }
}

/// Fields of a response other than its context.
pub trait ResponseBody<'a>: Sized {
    /// Protobuf message.
    type Message: Bounded;

    /// Returns the context of the message.
    fn context(message: &Self::Message) -> &Option<v1::ResponseContext>;

    /// Returns the context of the message, mutable.
    fn context_mut(message: &mut Self::Message) -> &mut Option<v1::ResponseContext>;

    /// Checks and converts all fields except the context.
    fn read(message: &'a Self::Message) -> Result<Self, ConvertError>;

    /// Converts the body to a message without context.
    fn write(&self) -> Self::Message;
}

/// Items of [`ResponseBody`] that are equal for all messages.
macro_rules! response_of {
    ($message:ty) => {
        type Message = $message;

        fn context(message: &$message) -> &Option<v1::ResponseContext> {
            &message.context
        }

        fn context_mut(message: &mut $message) -> &mut Option<v1::ResponseContext> {
            &mut message.context
        }
    };
}
pub(super) use response_of;

impl<'a, T: ResponseBody<'a>> Wire<'a> for Response<'a, T>
where
    T::Message: 'a,
{
    type Message = T::Message;

    fn from_wire(message: &'a T::Message) -> Result<Self, ConvertError> {
        let context = ResponseContext::of(T::context(message))?;
        let body = if context.code.is_none() { Some(T::read(message)?) } else { None };
        Ok(Response { context, body })
    }

    fn to_wire(&self) -> T::Message {
        let mut message = self.body.as_ref().map_or_else(T::Message::default, ResponseBody::write);
        *T::context_mut(&mut message) = Some(self.context.to_wire());
        message
    }
}
