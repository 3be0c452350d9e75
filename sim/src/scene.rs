//! [`Scene`]: what a process can do while something happens to it: send, and ask to be woken.

use std::time::Duration;

use moontide_master::election::Board;
use moontide_types::MonoTime;

use crate::clock::HostClock;
use crate::event::{Event, Events, Message, Timer, Who};
use crate::network::Network;
use crate::oracle::Oracle;

/// The world as a process sees it.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) events: &'a mut Events,
    pub(crate) network: &'a mut Network,
    pub(crate) oracle: &'a mut Oracle,
    pub(crate) board: &'a mut Board,
    pub(crate) who: Who,
    pub(crate) life: u32,
    pub(crate) clock: HostClock,
}

impl Scene<'_> {
    /// What the process's clock shows.
    pub(crate) fn now(&self) -> MonoTime {
        self.clock.mono(self.events.now())
    }

    /// What time it really is, which only the oracle knows.
    pub(crate) fn true_now(&self) -> MonoTime {
        self.events.now()
    }

    /// Wakes the process when so much time has passed by its clock.
    pub(crate) fn wake_in(&mut self, local: Duration, timer: Timer) {
        let span = self.clock.span(local);
        self.events.after(span, Event::Timer { who: self.who, life: self.life, timer });
    }

    pub(crate) fn send(&mut self, to: Who, message: Message) {
        self.network.send(self.events, self.who, to, message);
    }
}
