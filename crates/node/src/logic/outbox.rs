//! [`Outbox`]: messages of a node in a session, numbered without gaps and kept until the master acknowledges them. A
//! new stream of the same session continues after the last acknowledged message. [`HeartbeatTracker`]: heartbeats in
//! flight, and the send time of the last acknowledged one.

use std::collections::VecDeque;
use std::time::Duration;

use moontide_proto::v1;
use moontide_types::{MonoTime, SessionId, Term};
use v1::node_message::Body;

/// Unacknowledged messages of one session.
#[derive(Debug)]
pub(crate) struct Outbox {
    session: SessionId,
    /// Messages from the first unacknowledged one on.
    unacked: VecDeque<UnackedMessage>,
    /// Number of the first message in `unacked`.
    first: u64,
    /// Number of messages in `unacked` that were sent on the current stream.
    sent: usize,
    bytes: usize,
}

#[derive(Debug)]
struct UnackedMessage {
    body: Body,
    bytes: usize,
}

impl Outbox {
    pub(crate) fn new(session: SessionId) -> Outbox {
        Outbox { session, unacked: VecDeque::new(), first: 1, sent: 0, bytes: 0 }
    }

    /// Adds a message and returns its number.
    pub(crate) fn push(&mut self, body: Body) -> u64 {
        let bytes = bytes_of(&body);
        self.bytes += bytes;
        self.unacked.push_back(UnackedMessage { body, bytes });
        self.last()
    }

    /// Returns the number of the last message; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.first + self.unacked.len() as u64 - 1
    }

    /// Removes all messages up to `sequence`, which the master has applied. Ignores numbers that were not sent yet.
    pub(crate) fn acked(&mut self, sequence: u64) {
        while self.first <= sequence && self.sent > 0 {
            let Some(message) = self.unacked.pop_front() else { return };
            self.bytes -= message.bytes;
            self.first += 1;
            self.sent -= 1;
        }
    }

    /// Returns the number of the last acknowledged message.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.first - 1
    }

    /// Starts a new stream: all unacknowledged messages are sent again.
    pub(crate) fn rewind(&mut self) {
        self.sent = 0;
    }

    /// Whether there is a message to send.
    pub(crate) fn has_next(&self) -> bool {
        self.sent < self.unacked.len()
    }

    /// Returns the next message for the stream.
    pub(crate) fn next(&mut self, highest_term: Term) -> Option<v1::NodeMessage> {
        let body = self.unacked.get(self.sent)?.body.clone();
        let sequence = self.first + self.sent as u64;
        self.sent += 1;
        Some(v1::NodeMessage {
            session: self.session.0,
            sequence,
            highest_term: highest_term.get(),
            body: Some(body),
        })
    }

    /// Whether a result of a command is unacknowledged.
    pub(crate) fn has_results(&self) -> bool {
        self.unacked.iter().any(|message| matches!(message.body, Body::CommandResults(_)))
    }

    /// Approximate size of the unacknowledged messages.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Returns the approximate size of a message: its packed fields.
fn bytes_of(body: &Body) -> usize {
    match body {
        Body::Heartbeat(heartbeat) => {
            64 + heartbeat.segments.len() * 64 + heartbeat.touched.iter().map(|t| t.bits.len()).sum::<usize>()
        }
        Body::CommandResults(results) => results.results.len(),
        Body::Report(chunk) => chunk.records.len() + chunk.keys.len() + chunk.attributes.len(),
        Body::ReportEnd(_) | Body::CapabilityKeyHeld(_) => 64,
        Body::Offloaded(notice) => notice.records.len() + notice.keys.len() + notice.attributes.len(),
        Body::DiskEvicted(evicted) => evicted.versions.len(),
    }
}

/// Heartbeats in flight. The master keeps the session for its TTL from the *sending* of the last heartbeat that
/// arrived.
#[derive(Debug)]
pub(crate) struct HeartbeatTracker {
    last: u64,
    unacked: VecDeque<(u64, MonoTime)>,
    last_acked: MonoTime,
    ttl: Duration,
}

/// Maximum number of unacknowledged heartbeats; more carry no new information.
const UNACKED_HEARTBEATS_MAX: usize = 8;

impl HeartbeatTracker {
    /// Starts with a session that was requested at `asked`.
    pub(crate) fn new(requested: MonoTime, ttl: Duration) -> HeartbeatTracker {
        HeartbeatTracker { last: 0, unacked: VecDeque::new(), last_acked: requested, ttl }
    }

    /// Returns the id of the next heartbeat, sent now; `None` while too many are unacknowledged.
    pub(crate) fn heartbeat(&mut self, now: MonoTime) -> Option<u64> {
        if self.unacked.len() >= UNACKED_HEARTBEATS_MAX {
            return None;
        }
        self.last += 1;
        self.unacked.push_back((self.last, now));
        Some(self.last)
    }

    /// Records the acknowledgement of a heartbeat. Its `ttl` applies from now on.
    pub(crate) fn acked(&mut self, heartbeat_id: u64, ttl: Duration) {
        self.ttl = ttl;
        while let Some(&(number, sent)) = self.unacked.front() {
            if number > heartbeat_id {
                return;
            }
            self.last_acked = self.last_acked.max(sent);
            self.unacked.pop_front();
        }
    }

    /// Returns the send time of the last acknowledged heartbeat.
    pub(crate) fn last_acked(&self) -> MonoTime {
        self.last_acked
    }

    /// Whether the session has expired at the master.
    pub(crate) fn is_lost(&self, now: MonoTime) -> bool {
        now.since(self.last_acked) >= self.ttl
    }

    /// Whether a silent stream should be replaced, while the session still lives.
    pub(crate) fn is_overdue(&self, now: MonoTime) -> bool {
        now.since(self.last_acked) >= self.ttl / 2
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(records: u64) -> Body {
        Body::ReportEnd(v1::ReportEnd { records, ..Default::default() })
    }

    fn sent(outbox: &mut Outbox) -> Vec<u64> {
        std::iter::from_fn(|| outbox.next(Term::ZERO)).map(|message| message.sequence).collect()
    }

    #[test]
    fn outbox_resends_unacked_messages_on_new_stream() {
        let mut outbox = Outbox::new(SessionId(7));
        assert_eq!((1..=4).map(|n| outbox.push(body(n))).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(sent(&mut outbox), [1, 2, 3, 4]);
        assert!(!outbox.has_next());
        outbox.acked(2);
        assert_eq!((outbox.acknowledged(), outbox.last()), (2, 4));
        outbox.rewind();
        outbox.push(body(5));
        assert_eq!(sent(&mut outbox), [3, 4, 5]);
        outbox.acked(5);
        assert_eq!((outbox.bytes(), outbox.acknowledged()), (0, 5));
        assert_eq!(outbox.push(body(6)), 6);
        let message = outbox.next(Term::new(3).unwrap()).unwrap();
        assert_eq!((message.session, message.sequence, message.highest_term), (7, 6, 3));
    }

    #[test]
    fn ack_beyond_last_sent_message_is_clamped() {
        let mut outbox = Outbox::new(SessionId(7));
        outbox.push(body(1));
        outbox.push(body(2));
        outbox.next(Term::ZERO);
        outbox.acked(99);
        assert_eq!(outbox.acknowledged(), 1);
        assert_eq!(sent(&mut outbox), [2]);
        outbox.acked(0);
        outbox.acked(1);
        assert_eq!(outbox.acknowledged(), 1, "an old acknowledgement changes nothing");
    }

    #[test]
    fn session_ttl_counts_from_send_time_of_last_acked_heartbeat() {
        let ttl = Duration::from_nanos(100);
        let mut heartbeats = HeartbeatTracker::new(MonoTime(0), ttl);
        assert_eq!(heartbeats.heartbeat(MonoTime(10)), Some(1));
        assert_eq!(heartbeats.heartbeat(MonoTime(20)), Some(2));
        assert!(!heartbeats.is_lost(MonoTime(99)) && heartbeats.is_overdue(MonoTime(50)));
        assert!(heartbeats.is_lost(MonoTime(100)));
        heartbeats.acked(1, ttl);
        assert!(!heartbeats.is_lost(MonoTime(109)) && heartbeats.is_lost(MonoTime(110)));
        heartbeats.acked(2, Duration::from_nanos(10));
        assert!(heartbeats.is_lost(MonoTime(30)), "a shorter TTL applies at once");
        for _ in 0..UNACKED_HEARTBEATS_MAX {
            heartbeats.heartbeat(MonoTime(40));
        }
        assert_eq!(heartbeats.heartbeat(MonoTime(40)), None);
    }
}
