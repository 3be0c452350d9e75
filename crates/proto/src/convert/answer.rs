//! [`Answer`]: what was asked for, or why there is none. All answers are read in this one way.
//!
//! A call that failed as a whole says so in its context; nothing else of the message is judged then, because a
//! failed answer is left empty and an empty one would break the rules of most bodies.

use moontide_types::ErrorCode;

use super::bounded::Bounded;
use super::context::ResponseContext;
use super::{ConvertError, Wire};
use crate::v1;

/// An answer.
///
/// Invariant: there is a body if and only if the context has no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer<'a, T> {
    context: ResponseContext<'a>,
    body: Option<T>,
}

impl<'a, T> Answer<'a, T> {
    /// The answer of a call that succeeded. A code in the context is taken out.
    pub fn new(context: ResponseContext<'a>, body: T) -> Answer<'a, T> {
        Answer { context: ResponseContext { code: None, ..context }, body: Some(body) }
    }

    /// The answer of a call that failed as a whole.
    pub fn failed(context: ResponseContext<'a>, code: ErrorCode) -> Answer<'a, T> {
        Answer { context: ResponseContext { code: Some(code), ..context }, body: None }
    }

    /// Who answers, and what it knows.
    pub fn context(&self) -> &ResponseContext<'a> {
        &self.context
    }

    /// What was asked for; `None` if the call failed.
    pub fn body(&self) -> Option<&T> {
        self.body.as_ref()
    }

    /// What was asked for, or the context that says why there is none.
    pub fn into_result(self) -> Result<T, ResponseContext<'a>> {
        self.body.ok_or(self.context)
    }
}

/// What an answer carries beside its context.
pub trait AnswerBody<'a>: Sized {
    /// The message.
    type Message: Bounded;

    /// The context's place in the message.
    fn context(message: &Self::Message) -> &Option<v1::ResponseContext>;

    /// The same, to be filled in.
    fn context_mut(message: &mut Self::Message) -> &mut Option<v1::ResponseContext>;

    /// Checks everything but the context.
    fn read(message: &'a Self::Message) -> Result<Self, ConvertError>;

    /// The message without its context.
    fn write(&self) -> Self::Message;
}

/// The parts of [`AnswerBody`] that are the same for all messages.
macro_rules! answer_of {
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
pub(super) use answer_of;

impl<'a, T: AnswerBody<'a>> Wire<'a> for Answer<'a, T>
where
    T::Message: 'a,
{
    type Message = T::Message;

    fn from_wire(message: &'a T::Message) -> Result<Self, ConvertError> {
        let context = ResponseContext::of(T::context(message))?;
        let body = if context.code.is_none() { Some(T::read(message)?) } else { None };
        Ok(Answer { context, body })
    }

    fn to_wire(&self) -> T::Message {
        let mut message = self.body.as_ref().map_or_else(T::Message::default, AnswerBody::write);
        *T::context_mut(&mut message) = Some(self.context.to_wire());
        message
    }
}
