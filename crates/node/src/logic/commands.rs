//! Effect of a master's command on a slot, given the state of the slot in the heap, and [`DrainTracker`]: commands that
//! wait for slots to become free.
//!
//! | command | slot | action | reply |
//! |---|---|---|---|
//! | Kill | WRITING or READY of the epoch | kill; its space waits for the Reclaim | Accepted |
//! | | DEAD of the epoch | none | Accepted |
//! | | FREE of an earlier epoch | fence the epoch: the record never began and must not begin | Done |
//! | Reclaim | FREE of an earlier epoch | fence the epoch | Done |
//! | | FREE of this epoch or a later one | none | Done |
//! | | WRITING, READY or DEAD of the epoch | kill, reclaim at once | Accepted; Done when it is free |
//! | FenceEpoch | FREE | fence the epoch, unless it is past it already | Done |
//! | Offload | READY of the epoch | write to disk, and notify | Done |
//! | Promote | FREE | copy the version from disk into the slot | Done |
//! | Copy | FREE | copy the version from another node into the slot | Done |
//! | DropFromDisk | (none) | remove this and all earlier versions durably from disk | Done |
//! | any | in use by another epoch | none | Refused: StaleEpoch |
//!
//! A repeated command finds FREE of this epoch, so every command is idempotent. On a node with a disk, every Kill also
//! removes the version durably from the disk before the reply, whatever the slot contains.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_heap::Transition;
use moontide_proto::{CommandKind, CommandResult, CommandStatus, NodeCommand};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, ErrorCode, Generation, MonoTime, SegmentId, SessionId, SlotId, Term};

/// Version of the content of a slot.
pub(crate) type SlotVersion = (SegmentId, SlotId, Epoch);

/// Id of a command. Each session has its own numbers.
pub(crate) type CommandId = (SessionId, u64);

/// State of the segment that a command names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentInfo {
    pub(crate) generation: Generation,
    /// Term that the segment has adopted.
    pub(crate) adopted_term: Term,
    pub(crate) slots: u32,
}

/// Checks whether a command may be executed. `segment`: `None` if there is no such segment.
pub(crate) fn validate_command(
    command: &NodeCommand,
    segment: Option<SegmentInfo>,
    has_disk: bool,
) -> Result<(), ErrorCode> {
    if matches!(command.kind, CommandKind::Offload | CommandKind::Promote | CommandKind::DropFromDisk)
        && !has_disk
    {
        return Err(ErrorCode::Unsupported);
    }
    if command.kind == CommandKind::DropFromDisk {
        return Ok(()); // concerns no segment
    }
    let info = segment.ok_or(ErrorCode::NotFound)?;
    if info.generation != command.generation {
        return Err(ErrorCode::StaleGeneration);
    }
    // Only a mount or AdoptTerm changes the adopted term, no other command.
    let term_matches = if command.kind == CommandKind::AdoptTerm {
        command.term >= info.adopted_term
    } else {
        command.term == info.adopted_term || moontide_rt::mutation_enabled("command-of-any-term-executed")
    };
    if !term_matches {
        return Err(ErrorCode::StaleTerm);
    }
    if command.slot.0 < info.slots { Ok(()) } else { Err(ErrorCode::OutOfBounds) }
}

/// Next step of a command after a heap call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandStep {
    /// Reply; the command needs nothing more.
    Answer(CommandReply),
    /// Kill the record, reclaim it at once, and wait until the slot is free.
    Drain,
    /// The slot holds an older record that the master does not know: its reservation expired before the write began.
    /// Kill the record, reclaim it at once, and retry when the slot is free.
    Clear(Epoch),
}

/// Reply to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandReply {
    pub(crate) status: CommandStatus,
    pub(crate) code: Option<ErrorCode>,
    pub(crate) word: Word,
}

impl CommandReply {
    pub(crate) fn done(word: Word) -> CommandReply {
        CommandReply { status: CommandStatus::Done, code: None, word }
    }

    pub(crate) fn accepted(epoch: Epoch) -> CommandReply {
        CommandReply { status: CommandStatus::Accepted, code: None, word: Word::new(epoch, State::Dead) }
    }

    pub(crate) fn refused(code: ErrorCode, word: Word) -> CommandReply {
        CommandReply { status: CommandStatus::Refused, code: Some(code), word }
    }

    pub(crate) fn to(self, command_id: u64) -> CommandResult {
        CommandResult { command_id, word: self.word, code: self.code, status: self.status }
    }
}

/// Returns the reply to a Kill of a version that its slot does not hold, after an attempt to fence its epoch.
pub(crate) fn kill_reply(epoch: Epoch, fenced: Transition) -> CommandReply {
    match fenced {
        Transition::Done(_) | Transition::Already => CommandReply::done(Word::new(epoch, State::Free)),
        Transition::Refused(found) if found.state() == State::Free && found.epoch() >= epoch => {
            CommandReply::done(found)
        }
        Transition::Refused(found) if found.epoch() == epoch => CommandReply::accepted(epoch),
        Transition::Refused(found) => CommandReply::refused(ErrorCode::StaleEpoch, found),
    }
}

/// Returns the next step after an attempt to fence the epoch, for a Reclaim or FenceEpoch.
pub(crate) fn after_fence(kind: CommandKind, epoch: Epoch, fenced: Transition) -> CommandStep {
    let found = match fenced {
        Transition::Done(_) | Transition::Already => {
            return CommandStep::Answer(CommandReply::done(Word::new(epoch, State::Free)));
        }
        Transition::Refused(found) => found,
    };
    let already_free = found.state() == State::Free && found.epoch() >= epoch;
    let same_epoch = found.epoch() == epoch;
    match kind {
        _ if already_free => CommandStep::Answer(CommandReply::done(found)),
        CommandKind::Reclaim if same_epoch && moontide_rt::mutation_enabled("reclaim-done-while-held") => {
            CommandStep::Answer(CommandReply::done(found))
        }
        CommandKind::Reclaim if same_epoch => CommandStep::Drain,
        CommandKind::Reclaim
            if found.epoch() < epoch && !moontide_rt::mutation_enabled("late-begin-left") =>
        {
            CommandStep::Clear(found.epoch())
        }
        _ => CommandStep::Answer(CommandReply::refused(ErrorCode::StaleEpoch, found)),
    }
}

/// Slots that have to become free, for commands of masters or for the node itself (records that their writer
/// abandoned).
#[derive(Debug, Default)]
pub(crate) struct DrainTracker {
    drains: BTreeMap<SlotVersion, DrainState>,
    /// By session and number, to recognise a command that is sent again.
    commands: BTreeMap<CommandId, SlotVersion>,
}

#[derive(Debug)]
struct DrainState {
    since: MonoTime,
    commands: Vec<CommandId>,
    /// Whether [`DrainTracker::take_overdue`] has returned it.
    overdue: bool,
}

/// A slot that has been draining for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OverdueDrain {
    pub(crate) name: SlotVersion,
    pub(crate) since: MonoTime,
}

impl DrainTracker {
    /// Lets a command wait for a slot.
    pub(crate) fn add_command(&mut self, command: CommandId, name: SlotVersion, now: MonoTime) {
        self.add(name, now);
        if self.commands.insert(command, name).is_none() {
            self.drains.entry(name).and_modify(|drain| drain.commands.push(command));
        }
    }

    /// Lets the node itself wait for a slot.
    pub(crate) fn add(&mut self, name: SlotVersion, now: MonoTime) {
        self.drains.entry(name).or_insert(DrainState { since: now, commands: Vec::new(), overdue: false });
    }

    /// Whether the command is already waiting: it was sent again.
    pub(crate) fn contains(&self, command: CommandId) -> bool {
        self.commands.contains_key(&command)
    }

    /// Removes a freed slot and returns the commands that waited for it; none if only the node waited, and no master
    /// knows of the record.
    pub(crate) fn freed(&mut self, name: SlotVersion) -> Vec<CommandId> {
        let commands = self.drains.remove(&name).map_or_else(Vec::new, |drain| drain.commands);
        for command in &commands {
            self.commands.remove(command);
        }
        commands
    }

    /// Removes the commands of a session that has ended. Their slots go on draining; the next master learns of them by
    /// report.
    pub(crate) fn end_session(&mut self, session: SessionId) -> usize {
        let before = self.commands.len();
        self.commands.retain(|&(of, _), _| of != session);
        for drain in self.drains.values_mut() {
            drain.commands.retain(|&(of, _)| of != session);
        }
        before - self.commands.len()
    }

    /// Number of waiting commands.
    pub(crate) fn commands(&self) -> usize {
        self.commands.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.drains.is_empty()
    }

    /// Returns slots that have been draining for longer than `limit`; each of them once.
    pub(crate) fn take_overdue(&mut self, now: MonoTime, limit: Duration) -> Vec<OverdueDrain> {
        let is_overdue = |drain: &DrainState| !drain.overdue && now.since(drain.since) >= limit;
        let newly = self.drains.iter_mut().filter(|(_, drain)| is_overdue(drain));
        newly
            .map(|(&name, drain)| {
                drain.overdue = true;
                OverdueDrain { name, since: drain.since }
            })
            .collect()
    }

    /// Number of overdue slots.
    pub(crate) fn overdue(&self) -> usize {
        self.drains.values().filter(|drain| drain.overdue).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrorCode::{NotFound, StaleEpoch, StaleGeneration, StaleTerm, Unsupported};

    const S: SessionId = SessionId(1);
    const T: SessionId = SessionId(2);

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn word(bits: u64, state: State) -> Word {
        Word::new(epoch(bits), state)
    }

    fn term(term: u32) -> Term {
        Term::new(term).unwrap()
    }

    #[test]
    fn stale_or_unsupported_command_is_refused_with_code() {
        let info = Some(SegmentInfo { generation: Generation(9), adopted_term: term(5), slots: 8 });
        let cases = [
            (CommandKind::Kill, 9, 5, info, Ok(())),
            (CommandKind::Kill, 9, 5, None, Err(NotFound)),
            (CommandKind::Kill, 8, 5, info, Err(StaleGeneration)),
            (CommandKind::Reclaim, 10, 5, info, Err(StaleGeneration)),
            (CommandKind::Reclaim, 9, 4, info, Err(StaleTerm)),
            (CommandKind::FenceEpoch, 9, 6, info, Err(StaleTerm)),
            (CommandKind::AdoptTerm, 9, 6, info, Ok(())),
            (CommandKind::AdoptTerm, 9, 5, info, Ok(())),
            (CommandKind::AdoptTerm, 9, 4, info, Err(StaleTerm)),
            (CommandKind::Offload, 9, 5, info, Err(Unsupported)),
            (CommandKind::Promote, 9, 5, info, Err(Unsupported)),
            (CommandKind::DropFromDisk, 0, 5, None, Err(Unsupported)),
        ];
        for (kind, generation, of_term, info, expected) in cases {
            let command = NodeCommand {
                generation: Generation(generation),
                ..NodeCommand::new(1, kind, term(of_term))
            };
            assert_eq!(validate_command(&command, info, false), expected, "{kind:?} {generation} {of_term}");
        }
        for (slot, expected) in [(7, Ok(())), (8, Err(ErrorCode::OutOfBounds))] {
            let command =
                NodeCommand { slot: SlotId(slot), ..NodeCommand::new(1, CommandKind::Reclaim, term(5)) };
            let command = NodeCommand { generation: Generation(9), ..command };
            assert_eq!(validate_command(&command, info, false), expected, "slot {slot}");
        }
    }

    #[test]
    fn reply_after_epoch_fence_depends_on_command_and_slot_word() {
        use CommandKind::{FenceEpoch, Reclaim};
        use Transition::{Already, Done, Refused};
        let done = |w| CommandStep::Answer(CommandReply::done(w));
        let stale = |w| CommandStep::Answer(CommandReply::refused(StaleEpoch, w));
        let (free4, free5, free6) = (word(4, State::Free), word(5, State::Free), word(6, State::Free));
        let mut cases = vec![];
        for kind in [Reclaim, FenceEpoch] {
            cases.push((kind, Done(free4), done(free5)));
            cases.push((kind, Already, done(free5)));
            cases.push((kind, Refused(free6), done(free6)));
            for state in [State::Writing, State::Ready, State::Dead] {
                // An older record is unknown to the master. A Reclaim needs the slot to be free.
                let older =
                    if kind == Reclaim { CommandStep::Clear(epoch(4)) } else { stale(word(4, state)) };
                cases.push((kind, Refused(word(4, state)), older));
                cases.push((kind, Refused(word(6, state)), stale(word(6, state))));
                let own = if kind == Reclaim { CommandStep::Drain } else { stale(word(5, state)) };
                cases.push((kind, Refused(word(5, state)), own));
            }
        }
        for (kind, fenced, expected) in cases {
            assert_eq!(after_fence(kind, epoch(5), fenced), expected, "{kind:?} {fenced:?}");
        }
    }

    #[test]
    fn reply_to_kill_of_absent_version_depends_on_slot_word() {
        use Transition::{Already, Done, Refused};
        let (free4, free5, free6) = (word(4, State::Free), word(5, State::Free), word(6, State::Free));
        assert_eq!(kill_reply(epoch(5), Done(free4)), CommandReply::done(free5));
        assert_eq!(kill_reply(epoch(5), Already), CommandReply::done(free5));
        assert_eq!(kill_reply(epoch(5), Refused(free6)), CommandReply::done(free6));
        for state in [State::Writing, State::Ready, State::Dead] {
            let of = |bits| kill_reply(epoch(5), Refused(word(bits, state)));
            assert_eq!(of(4), CommandReply::refused(StaleEpoch, word(4, state)));
            assert_eq!(of(5), CommandReply::accepted(epoch(5)));
            assert_eq!(of(6), CommandReply::refused(StaleEpoch, word(6, state)));
        }
    }

    #[test]
    fn freed_slot_completes_all_commands_waiting_for_it() {
        let mut drains = DrainTracker::default();
        let (first, second) = ((SegmentId(0), SlotId(1), epoch(5)), (SegmentId(0), SlotId(2), epoch(6)));
        drains.add_command((S, 7), first, MonoTime(0));
        drains.add_command((T, 8), second, MonoTime(0));
        drains.add_command((S, 9), first, MonoTime(0));
        assert!(drains.contains((S, 7)) && !drains.contains((T, 7)) && !drains.contains((S, 1)));
        assert_eq!(drains.freed(first), [(S, 7), (S, 9)]);
        assert_eq!(drains.end_session(S), 0);
        assert!(drains.freed(first).is_empty());
        assert_eq!(drains.end_session(T), 1);
        assert!(!drains.is_empty(), "its slot is still draining");
        assert!(drains.freed(second).is_empty());
        assert!(drains.is_empty());
    }

    #[test]
    fn overdue_drain_is_reported_once() {
        let mut drains = DrainTracker::default();
        let name = (SegmentId(0), SlotId(1), epoch(5));
        let limit = Duration::from_nanos(10);
        drains.add(name, MonoTime(5));
        assert!(drains.take_overdue(MonoTime(14), limit).is_empty());
        assert_eq!(drains.take_overdue(MonoTime(15), limit), [OverdueDrain { name, since: MonoTime(5) }]);
        assert!(drains.take_overdue(MonoTime(99), limit).is_empty());
        assert_eq!(drains.overdue(), 1);
        drains.freed(name);
        assert_eq!(drains.overdue(), 0);
    }
}
