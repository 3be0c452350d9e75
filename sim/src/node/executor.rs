//! [`CommandExecutor`]: executes the commands of masters, and reclaims slots.

use std::collections::BTreeSet;

use moontide_heap::KillOutcome;
use moontide_node::logic::commands::{
    CommandId, CommandReply, CommandStep, DrainTracker, SegmentInfo, SlotVersion, after_fence, kill_reply,
    validate_command,
};
use moontide_node::logic::report::SlotChange;
use moontide_node::logic::timing::reclaim_interval;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{CommandKind, CommandResult, CommandStatus, NodeCommand};
use moontide_types::record::{State, Word};
use moontide_types::{ErrorCode, MonoTime, SessionId};

use super::{ExecutorTask, LONG_AGO, Node, NodeEvent, NodeTimer};
use crate::context::ProcessContext;
use crate::event::Timer;

/// A killed slot is not due before its Reclaim command.
const NEVER: MonoTime = MonoTime(u64::MAX);

#[derive(Debug)]
pub(super) struct CommandExecutor {
    /// Those that have begun and not ended.
    sessions: BTreeSet<SessionId>,
    drains: DrainTracker,
    /// Commands of this round that wait for their slot.
    fresh: Vec<(CommandId, SlotVersion)>,
    /// Commands whose slot holds an older record, which must be reclaimed first.
    again: Vec<(SessionId, NodeCommand)>,
    results: Vec<(SessionId, CommandResult)>,
    progress: MonoTime,
    /// Which reclaim is waited for.
    round: u64,
}

impl Default for CommandExecutor {
    fn default() -> CommandExecutor {
        CommandExecutor {
            sessions: BTreeSet::new(),
            drains: DrainTracker::default(),
            fresh: Vec::new(),
            again: Vec::new(),
            results: Vec::new(),
            progress: LONG_AGO,
            round: 0,
        }
    }
}

impl Node {
    pub(super) fn take_work(&mut self, cx: &mut ProcessContext<'_>) {
        for work in std::mem::take(&mut self.work) {
            match work {
                ExecutorTask::Session { begins, ends } => self.begin_session(begins, ends, cx),
                ExecutorTask::Commands { session, commands } => {
                    commands.iter().for_each(|command| self.carry_out(session, command, cx));
                }
                ExecutorTask::GivenUp(names) => {
                    let now = cx.now();
                    names.into_iter().for_each(|name| self.executor.drains.add(name, now));
                    self.executor.progress = now;
                }
            }
        }
        self.round(cx);
    }

    pub(super) fn reclaim_due(&mut self, round: u64, cx: &mut ProcessContext<'_>) {
        if round == self.executor.round {
            self.round(cx);
        }
    }

    pub(super) fn wake_to_reclaim(&mut self, cx: &mut ProcessContext<'_>) {
        let executor = &mut self.executor;
        executor.round += 1;
        let wait = reclaim_interval(!executor.drains.is_empty(), executor.progress, cx.now());
        cx.wake_in(wait, Timer::Node(NodeTimer::Reclaim { round: executor.round }));
    }

    fn begin_session(
        &mut self,
        begins: Option<SessionId>,
        ends: Option<SessionId>,
        cx: &mut ProcessContext<'_>,
    ) {
        self.answer_all(cx);
        if let Some(ends) = ends {
            self.executor.fresh.retain(|&((session, _), _)| session != ends);
            self.executor.again.retain(|&(session, _)| session != ends);
            self.executor.drains.end_session(ends);
            self.executor.sessions.remove(&ends);
        }
        self.executor.sessions.extend(begins);
    }

    fn carry_out(&mut self, session: SessionId, command: &NodeCommand, cx: &mut ProcessContext<'_>) {
        let number = (session, command.command_id);
        let waits = |&(session, command): &(SessionId, NodeCommand)| (session, command.command_id) == number;
        let is_known = self.executor.drains.contains(number) || self.executor.again.iter().any(waits);
        if !self.executor.sessions.contains(&session) || is_known {
            return; // it is over; or it was sent again on a new stream, and is still under way
        }
        let known = self.memory.node_segment(command.segment).map(|node_segment| SegmentInfo {
            generation: node_segment.segment.shape().generation,
            adopted_term: node_segment.segment.adopted_term(),
            slots: node_segment.segment.shape().slots,
        });
        if let Err(code) = validate_command(command, known, self.disk.is_some()) {
            return self.reply(number, CommandReply::refused(code, Word::default()));
        }
        // Nothing is to appear there any more.
        if let (Some(disk), CommandKind::Kill | CommandKind::Reclaim) = (&mut self.disk, command.kind) {
            disk.cancel_promotion(command.segment, command.slot);
        }
        let done = CommandReply::done(Word::default());
        match command.kind {
            CommandKind::Kill => self.kill(number, command, cx),
            CommandKind::Reclaim | CommandKind::FenceEpoch => self.burn(number, command, cx),
            CommandKind::Drain => {
                self.memory.side_mut(command.segment).expect("it is known").closed = true;
                self.reply(number, done);
            }
            CommandKind::AdoptTerm => {
                let node_segment = self.memory.side_mut(command.segment).expect("it is known");
                node_segment.granted(command.group, command.term);
                self.send_event(NodeEvent::Report(command.segment), cx);
                self.reply(number, done);
            }
            CommandKind::Offload | CommandKind::Promote | CommandKind::DropFromDisk => {
                self.disk_order(session, command, cx);
            }
            CommandKind::Scrub => {
                self.reply(number, CommandReply::refused(ErrorCode::Unsupported, Word::default()));
            }
        }
    }

    fn kill(&mut self, number: CommandId, command: &NodeCommand, cx: &mut ProcessContext<'_>) {
        let (segment, slot, epoch) = (command.segment, command.slot, command.epoch);
        let killed = self.memory.heap.kill(segment, slot, epoch, NEVER) != KillOutcome::NotFound;
        let reply = if killed {
            self.memory.note(segment, slot, epoch, State::Dead, None);
            CommandReply::accepted(epoch)
        } else {
            let reply = kill_reply(epoch, self.memory.heap.fence_epoch(segment, slot, epoch));
            if reply.status == CommandStatus::Done {
                self.memory.note(segment, slot, epoch, State::Free, None);
            }
            reply
        };
        // The disk would restore the record after a crash: the removal is durable before it is acknowledged.
        match self.disk {
            Some(_) => self.remove_from_disk(number.0, command, reply, cx),
            None => self.reply(number, reply),
        }
    }

    fn burn(&mut self, number: CommandId, command: &NodeCommand, cx: &mut ProcessContext<'_>) {
        let (segment, slot, epoch) = (command.segment, command.slot, command.epoch);
        let burnt = self.memory.heap.fence_epoch(segment, slot, epoch);
        match after_fence(command.kind, epoch, burnt) {
            CommandStep::Answer(reply) => {
                if reply.status == CommandStatus::Done {
                    self.memory.note(segment, slot, epoch, State::Free, None);
                }
                self.reply(number, reply);
            }
            CommandStep::Clear(older) => {
                let _ = self.memory.heap.kill(segment, slot, older, LONG_AGO);
                self.memory.note(segment, slot, older, State::Dead, None);
                let now = cx.now();
                self.executor.drains.add((segment, slot, older), now);
                self.executor.again.push((number.0, *command));
                self.executor.progress = now;
            }
            CommandStep::Drain => {
                // Due at once, also if it was killed before and was to wait.
                let _ = self.memory.heap.kill(segment, slot, epoch, LONG_AGO);
                self.memory.note(segment, slot, epoch, State::Dead, None);
                let now = cx.now();
                self.executor.drains.add_command(number, (segment, slot, epoch), now);
                self.executor.fresh.push((number, (segment, slot, epoch)));
                self.executor.progress = now;
            }
        }
    }

    /// Reclaims slots, and sends the results.
    fn round(&mut self, cx: &mut ProcessContext<'_>) {
        let now = cx.now();
        let reclaimed = self.memory.heap.reclaim(now);
        for freed in &reclaimed.freed {
            let (segment, slot, epoch) = (freed.segment, freed.slot, freed.epoch);
            self.memory.note(segment, slot, epoch, State::Free, None);
            let commands = self.executor.drains.freed((segment, slot, epoch));
            if commands.is_empty() {
                self.send_event(NodeEvent::Change(SlotChange::Freed { segment, slot, epoch }), cx);
            }
            for command in commands {
                self.reply(command, CommandReply::done(Word::new(epoch, State::Free)));
            }
            self.executor.progress = now;
        }
        for (session, command) in std::mem::take(&mut self.executor.again) {
            self.burn((session, command.command_id), &command, cx);
        }
        // The remaining slots are dead for readers, so the master need not wait for the reclaim.
        for (command, (_, _, epoch)) in std::mem::take(&mut self.executor.fresh) {
            if self.executor.drains.contains(command) {
                self.reply(command, CommandReply::accepted(epoch));
            }
        }
        self.answer_all(cx);
        self.wake_to_reclaim(cx);
    }

    fn reply(&mut self, (session, command): CommandId, reply: CommandReply) {
        self.executor.results.push((session, reply.to(command)));
    }

    fn answer_all(&mut self, cx: &mut ProcessContext<'_>) {
        let mut all = std::mem::take(&mut self.executor.results);
        all.sort_by_key(|&(session, _)| session);
        for of_session in all.chunk_by(|one, other| one.0 == other.0) {
            for results in of_session.chunks(SESSION_RECORDS_MAX) {
                let (session, results) = (results[0].0, results.iter().map(|&(_, result)| result).collect());
                self.send_event(NodeEvent::Results { session, results }, cx);
            }
        }
    }

    /// Reports slots that died without a command of the master.
    pub(super) fn gave_up(&mut self, names: Vec<SlotVersion>, cx: &mut ProcessContext<'_>) {
        for &(segment, slot, epoch) in &names {
            self.memory.note(segment, slot, epoch, State::Dead, None);
            self.send_event(NodeEvent::Change(SlotChange::Killed { segment, slot, epoch }), cx);
        }
        self.give_work(ExecutorTask::GivenUp(names), cx);
    }
}
