//! [`ProcessContext`]: interface of a process to the world while it handles an event: send messages, set timers.

use std::time::Duration;

use moontide_master::election::RegistryState;
use moontide_types::MonoTime;

use crate::clock::HostClock;
use crate::event::{Event, Events, Message, ProcessId, Timer};
use crate::network::Network;
use crate::oracle::Oracle;

/// The world as a process sees it.
#[derive(Debug)]
pub(crate) struct ProcessContext<'a> {
    pub(crate) events: &'a mut Events,
    pub(crate) network: &'a mut Network,
    pub(crate) oracle: &'a mut Oracle,
    pub(crate) registry: &'a mut RegistryState,
    pub(crate) process: ProcessId,
    pub(crate) incarnation: u32,
    pub(crate) clock: HostClock,
}

impl ProcessContext<'_> {
    /// What the process's clock shows.
    pub(crate) fn now(&self) -> MonoTime {
        self.clock.mono(self.events.now())
    }

    /// Returns the world time, which only the oracle may use.
    pub(crate) fn world_now(&self) -> MonoTime {
        self.events.now()
    }

    /// Wakes the process when so much time has passed by its clock.
    pub(crate) fn wake_in(&mut self, local: Duration, timer: Timer) {
        let span = self.clock.span(local);
        self.events.after(span, Event::Timer { process: self.process, incarnation: self.incarnation, timer });
    }

    pub(crate) fn send(&mut self, to: ProcessId, message: Message) {
        self.network.send(self.events, self.process, to, message);
    }
}
