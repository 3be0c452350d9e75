//! [`Outgoing`]: what a node says in a session, numbered without gap and kept until the master has it. A new stream of
//! the same session goes on where the old one was heard. [`Beats`]: when the master was last known to hear.

use std::collections::VecDeque;
use std::time::Duration;

use moontide_proto::v1;
use moontide_types::{MonoTime, SessionId, Term};
use v1::node_message::Body;

/// Messages of one session.
#[derive(Debug)]
pub struct Outgoing {
    session: SessionId,
    /// From the first that is not acknowledged on.
    kept: VecDeque<Kept>,
    /// Number of the first one kept.
    first: u64,
    /// How many of those kept were sent on the current stream.
    sent: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Kept {
    body: Body,
    bytes: usize,
}

impl Outgoing {
    pub fn new(session: SessionId) -> Outgoing {
        Outgoing { session, kept: VecDeque::new(), first: 1, sent: 0, bytes: 0 }
    }

    /// Adds a message; its number.
    pub fn push(&mut self, body: Body) -> u64 {
        let bytes = bytes_of(&body);
        self.bytes += bytes;
        self.kept.push_back(Kept { body, bytes });
        self.last()
    }

    /// Number of the last message; 0 before the first.
    pub fn last(&self) -> u64 {
        self.first + self.kept.len() as u64 - 1
    }

    /// The master has applied all messages up to this one. What it cannot have seen yet is not believed.
    pub fn acked(&mut self, sequence: u64) {
        while self.first <= sequence && self.sent > 0 {
            let Some(kept) = self.kept.pop_front() else { return };
            self.bytes -= kept.bytes;
            self.first += 1;
            self.sent -= 1;
        }
    }

    /// Number of the last message that was acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.first - 1
    }

    /// A new stream: everything that is kept is said again.
    pub fn rewind(&mut self) {
        self.sent = 0;
    }

    /// Whether there is something to be sent.
    pub fn has_next(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// The next message for the stream.
    pub fn next(&mut self, highest_term: Term) -> Option<v1::NodeMessage> {
        let body = self.kept.get(self.sent)?.body.clone();
        let sequence = self.first + self.sent as u64;
        self.sent += 1;
        Some(v1::NodeMessage {
            session: self.session.0,
            sequence,
            highest_term: highest_term.get(),
            body: Some(body),
        })
    }

    /// Of messages that are kept, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What a message takes, about: its packed fields.
fn bytes_of(body: &Body) -> usize {
    match body {
        Body::Heartbeat(beat) => {
            64 + beat.segments.len() * 64 + beat.touched.iter().map(|t| t.bits.len()).sum::<usize>()
        }
        Body::OrderResults(results) => results.results.len(),
        Body::Report(chunk) => chunk.records.len() + chunk.keys.len() + chunk.attributes.len(),
        Body::ReportEnd(_) => 64,
        Body::Offloaded(notice) => notice.records.len() + notice.keys.len() + notice.attributes.len(),
        Body::DiskEvicted(evicted) => evicted.versions.len(),
    }
}

/// Heartbeats under way: the session lives for its time to live from the *sending* of the last one that arrived.
#[derive(Debug)]
pub struct Beats {
    last: u64,
    unheard: VecDeque<(u64, MonoTime)>,
    heard: MonoTime,
    ttl: Duration,
}

/// Beats that are not acknowledged; more say nothing new.
const BEATS_UNHEARD_MAX: usize = 8;

impl Beats {
    /// A session that was asked for at `asked`.
    pub fn new(asked: MonoTime, ttl: Duration) -> Beats {
        Beats { last: 0, unheard: VecDeque::new(), heard: asked, ttl }
    }

    /// The next beat's number, sent now; none while too many are unheard.
    pub fn beat(&mut self, now: MonoTime) -> Option<u64> {
        if self.unheard.len() >= BEATS_UNHEARD_MAX {
            return None;
        }
        self.last += 1;
        self.unheard.push_back((self.last, now));
        Some(self.last)
    }

    /// A beat arrived; what it says about the time to live holds from now on.
    pub fn acked(&mut self, beat: u64, ttl: Duration) {
        self.ttl = ttl;
        while let Some(&(number, sent)) = self.unheard.front() {
            if number > beat {
                return;
            }
            self.heard = self.heard.max(sent);
            self.unheard.pop_front();
        }
    }

    /// When the last beat that arrived was sent.
    pub fn heard(&self) -> MonoTime {
        self.heard
    }

    /// Whether the master must have given the session up.
    pub fn is_lost(&self, now: MonoTime) -> bool {
        now.since(self.heard) >= self.ttl
    }

    /// Whether a stream that says nothing should be tried anew, while there is time.
    pub fn is_silent(&self, now: MonoTime) -> bool {
        now.since(self.heard) >= self.ttl / 2
    }

    pub fn ttl(&self) -> Duration {
        self.ttl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(records: u64) -> Body {
        Body::ReportEnd(v1::ReportEnd { records, ..Default::default() })
    }

    fn sent(outgoing: &mut Outgoing) -> Vec<u64> {
        std::iter::from_fn(|| outgoing.next(Term::ZERO)).map(|message| message.sequence).collect()
    }

    #[test]
    fn a_new_stream_goes_on_where_the_old_one_was_heard() {
        let mut outgoing = Outgoing::new(SessionId(7));
        assert_eq!((1..=4).map(|n| outgoing.push(body(n))).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(sent(&mut outgoing), [1, 2, 3, 4]);
        assert!(!outgoing.has_next());
        outgoing.acked(2);
        assert_eq!((outgoing.acknowledged(), outgoing.last()), (2, 4));
        outgoing.rewind();
        outgoing.push(body(5));
        assert_eq!(sent(&mut outgoing), [3, 4, 5]);
        outgoing.acked(5);
        assert_eq!((outgoing.bytes(), outgoing.acknowledged()), (0, 5));
        assert_eq!(outgoing.push(body(6)), 6);
        let message = outgoing.next(Term::new(3).unwrap()).unwrap();
        assert_eq!((message.session, message.sequence, message.highest_term), (7, 6, 3));
    }

    #[test]
    fn what_was_not_sent_cannot_be_acknowledged() {
        let mut outgoing = Outgoing::new(SessionId(7));
        outgoing.push(body(1));
        outgoing.push(body(2));
        outgoing.next(Term::ZERO);
        outgoing.acked(99);
        assert_eq!(outgoing.acknowledged(), 1);
        assert_eq!(sent(&mut outgoing), [2]);
        outgoing.acked(0);
        outgoing.acked(1);
        assert_eq!(outgoing.acknowledged(), 1, "an old acknowledgement takes nothing back");
    }

    #[test]
    fn a_session_lives_from_the_sending_of_the_last_beat_that_arrived() {
        let ttl = Duration::from_nanos(100);
        let mut beats = Beats::new(MonoTime(0), ttl);
        assert_eq!(beats.beat(MonoTime(10)), Some(1));
        assert_eq!(beats.beat(MonoTime(20)), Some(2));
        assert!(!beats.is_lost(MonoTime(99)) && beats.is_silent(MonoTime(50)));
        assert!(beats.is_lost(MonoTime(100)));
        beats.acked(1, ttl);
        assert!(!beats.is_lost(MonoTime(109)) && beats.is_lost(MonoTime(110)));
        beats.acked(2, Duration::from_nanos(10));
        assert!(beats.is_lost(MonoTime(30)), "a shorter time to live holds at once");
        for _ in 0..BEATS_UNHEARD_MAX {
            beats.beat(MonoTime(40));
        }
        assert_eq!(beats.beat(MonoTime(40)), None);
    }
}
