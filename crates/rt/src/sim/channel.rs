//! Channels with the interface of [`std::sync::mpsc`], from a lock and a condition variable.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError};
use std::time::Duration;

use super::{Condvar, Instant, Mutex};

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Notified when a message arrives, and when the last sender is dropped.
    arrived: Condvar,
}

struct State<T> {
    messages: VecDeque<T>,
    senders: usize,
    has_receiver: bool,
}

/// Creates a channel without a limit.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = State { messages: VecDeque::new(), senders: 1, has_receiver: true };
    let shared = Arc::new(Shared { state: Mutex::new(state), arrived: Condvar::new() });
    (Sender { shared: shared.clone() }, Receiver { shared, not_sync: PhantomData })
}

/// The sending half.
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
}

/// The receiving half.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    /// Only one thread receives, as with std's.
    not_sync: PhantomData<Cell<()>>,
}

impl<T> Sender<T> {
    /// Sends a message. Never waits for the receiver.
    ///
    /// # Errors
    /// If the receiver was dropped.
    #[track_caller]
    pub fn send(&self, message: T) -> Result<(), SendError<T>> {
        let mut state = self.shared.state.lock();
        if !state.has_receiver {
            return Err(SendError(message));
        }
        state.messages.push_back(message);
        self.shared.arrived.notify_one();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.shared.state.lock().senders += 1;
        Sender { shared: self.shared.clone() }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.senders -= 1;
        if state.senders == 0 {
            self.shared.arrived.notify_all();
        }
    }
}

impl<T> Receiver<T> {
    /// Waits for a message.
    ///
    /// # Errors
    /// If no message is left and all senders were dropped.
    #[track_caller]
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(message) = state.messages.pop_front() {
                return Ok(message);
            }
            if state.senders == 0 {
                return Err(RecvError);
            }
            self.shared.arrived.wait(&mut state);
        }
    }

    /// Waits for a message, at most for `timeout`.
    ///
    /// # Errors
    /// If the time is over, or no message is left and all senders were dropped.
    #[track_caller]
    pub fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
        let until = Instant::now().checked_add(timeout);
        let mut state = self.shared.state.lock();
        loop {
            if let Some(message) = state.messages.pop_front() {
                return Ok(message);
            }
            if state.senders == 0 {
                return Err(RecvTimeoutError::Disconnected);
            }
            match until {
                Some(until) => {
                    let timed_out = self.shared.arrived.wait_until(&mut state, until).timed_out();
                    if timed_out && state.messages.is_empty() && state.senders > 0 {
                        return Err(RecvTimeoutError::Timeout);
                    }
                }
                None => self.shared.arrived.wait(&mut state),
            }
        }
    }

    /// Returns a message that is there.
    ///
    /// # Errors
    /// If there is none, or also no sender.
    #[track_caller]
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let mut state = self.shared.state.lock();
        let nothing = if state.senders == 0 { TryRecvError::Disconnected } else { TryRecvError::Empty };
        state.messages.pop_front().ok_or(nothing)
    }

    /// Iterates over all messages until all senders were dropped.
    pub fn iter(&self) -> Iter<'_, T> {
        Iter { receiver: self }
    }

    /// Iterates over the messages that are there.
    pub fn try_iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let unread = {
            let mut state = self.shared.state.lock();
            state.has_receiver = false;
            std::mem::take(&mut state.messages)
        };
        // A message may contain a sender of this channel: it is dropped without the lock.
        drop(unread);
    }
}

/// Messages of a receiver.
#[derive(Debug)]
pub struct Iter<'a, T> {
    receiver: &'a Receiver<T>,
}

impl<T> Iterator for Iter<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.receiver.recv().ok()
    }
}

impl<'a, T> IntoIterator for &'a Receiver<T> {
    type Item = T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver")
    }
}
