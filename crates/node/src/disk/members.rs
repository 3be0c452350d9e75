//! [`MemberState`]: which directories of a node hold valid records, agreed by the directories themselves.
//!
//! A removal is acknowledged when it is durable in all valid directories. A directory that was excluded, or was left out
//! at a start, misses removals, so it must not be valid again before it has been emptied. It cannot know that by itself.
//! Each directory therefore stores the list of the valid ones, and a start needs a quorum of that list.
//!
//! The list changes in three steps, as in Paxos with joint configurations, because the process can end between any two
//! writes, and the next start may see other directories:
//!
//! 1. A quorum of the old list promises a number that none of them has seen.
//! 2. All directories of the new list store it under that number, together with the lists that it replaces. A start that
//!    finds it needs a quorum of each of them.
//! 3. They store the new list alone.
//!
//! The new list is in force after the second step. The list with the highest number that a start finds decides.

use std::fmt::Write as _;
use std::io;

/// Number of a directory. An emptied directory has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DeviceId(pub(crate) u64);

/// First line of the state as text.
const MAGIC_LINE: &str = "moontide disk members, version 1";

/// Last line: without it, the text is not complete.
const END_LINE: &str = "end\n";

/// Maximum number of lists in a state: each process that ends within a change adds one.
const LISTS_MAX: usize = 64;

/// Directories with valid records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemberList {
    pub(super) number: u64,
    pub(super) ids: Vec<DeviceId>,
}

impl MemberList {
    /// Whether these directories outvote all others: more than half of them, or half of them with the first one. Two
    /// quorums have a directory in common.
    fn has_quorum(&self, present: impl Fn(DeviceId) -> bool) -> bool {
        let count = self.ids.iter().filter(|&&id| present(id)).count();
        2 * count > self.ids.len()
            || (2 * count == self.ids.len() && self.ids.first().is_some_and(|&id| present(id)))
    }
}

/// What a directory stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemberState {
    pub(super) id: DeviceId,
    /// Lists with lower numbers are not accepted.
    pub(super) promised: u64,
    /// The newest list, and those that it replaces until it is complete. Empty in a directory that belongs to none.
    pub(super) lists: Vec<MemberList>,
}

impl MemberState {
    /// The state of a directory that belongs to no list.
    pub(super) fn unlisted(id: DeviceId) -> MemberState {
        MemberState { id, promised: 0, lists: vec![] }
    }

    /// The state of a node's only directory.
    pub(super) fn single(id: DeviceId) -> MemberState {
        MemberState { id, promised: 0, lists: vec![MemberList { number: 0, ids: vec![id] }] }
    }

    fn number(&self) -> Option<u64> {
        self.lists.first().map(|list| list.number)
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{MAGIC_LINE}\nid {:016x}\npromised {}\n", self.id.0, self.promised);
        for list in &self.lists {
            let _ = write!(text, "list {}", list.number);
            for id in &list.ids {
                let _ = write!(text, " {:016x}", id.0);
            }
            text.push('\n');
        }
        text.push_str(END_LINE);
        text
    }

    /// Returns `None` if the text is malformed.
    pub(super) fn from_text(text: &str) -> Option<MemberState> {
        let id = |text: &str| {
            let number = u64::from_str_radix(text, 16).ok().filter(|_| text.len() == 16);
            number.map(DeviceId)
        };
        let mut lines = text.strip_suffix(END_LINE)?.lines();
        if lines.next()? != MAGIC_LINE {
            return None;
        }
        let own = id(lines.next()?.strip_prefix("id ")?)?;
        let promised = lines.next()?.strip_prefix("promised ")?.parse().ok()?;
        let list = |line: &str| {
            let mut words = line.strip_prefix("list ")?.split(' ');
            let number = words.next()?.parse().ok()?;
            let ids = words.map(id).collect::<Option<Vec<DeviceId>>>()?;
            (!ids.is_empty()).then_some(MemberList { number, ids })
        };
        let lists = lines.map(list).collect::<Option<Vec<MemberList>>>()?;
        (lists.len() <= LISTS_MAX).then_some(MemberState { id: own, promised, lists })
    }
}

/// Where the states of directories are stored.
pub(super) trait MemberFiles {
    /// Replaces the state of a directory durably.
    fn write(&mut self, directory: usize, state: &MemberState) -> io::Result<()>;

    /// Removes everything but the state of a directory.
    fn empty(&mut self, directory: usize) -> io::Result<()>;
}

/// Why the directories cannot be used.
#[derive(Debug)]
pub(super) enum MemberError {
    /// Too many directories of the newest list are missing; or all of those that are there were excluded.
    NoQuorum { present: usize, members: usize },
    /// A directory cannot be written.
    Write { directory: usize, source: io::Error },
    /// Too many changes were not completed.
    TooMany,
}

/// What a start finds in a directory.
#[derive(Clone, Debug)]
pub(super) enum Found {
    /// It does not belong to this node yet.
    New,
    /// It belongs to this node.
    Own(MemberState),
}

impl Found {
    /// Decides what directories are, by whether they have the identity of the node, and by their states. `random_id` returns
    /// numbers.
    pub(super) fn of(
        directories: &[(bool, Option<MemberState>)],
        mut random_id: impl FnMut() -> DeviceId,
    ) -> Vec<Found> {
        // Directories that joined, and the process ended before they got their identity: those that are listed together with
        // one that has it. Their votes count.
        let mut own: Vec<DeviceId> = Vec::new();
        let has_own = |own: &[DeviceId], list: &MemberList| list.ids.iter().any(|id| own.contains(id));
        for (has_identity, state) in directories {
            own.extend(state.as_ref().filter(|_| *has_identity).map(|state| state.id));
        }
        let lists =
            || directories.iter().filter_map(|(_, state)| state.as_ref()).flat_map(|state| &state.lists);
        let with_own: Vec<&MemberList> = lists().filter(|list| has_own(&own, list)).collect();
        let joined = |id: DeviceId| with_own.iter().any(|list| list.ids.contains(&id));
        let found = directories.iter().map(|(has_identity, state)| match (has_identity, state) {
            (true, Some(state)) => Found::Own(state.clone()),
            // It was always the only one.
            (true, None) => Found::Own(MemberState::single(random_id())),
            (false, Some(state)) if joined(state.id) => Found::Own(state.clone()),
            (false, _) => Found::New,
        });
        found.collect()
    }
}

/// The directories of a process, in the order of its configuration.
#[derive(Debug)]
pub(super) struct Members {
    /// `None`: the directory is not used.
    states: Vec<Option<MemberState>>,
}

impl Members {
    /// Makes the directories that can be used a list: those of the newest list keep their records, the others are emptied first.
    /// `random_id` returns numbers for them. Also returns which directories keep their records.
    pub(super) fn start(
        found: &[Found],
        files: &mut dyn MemberFiles,
        mut random_id: impl FnMut() -> DeviceId,
    ) -> Result<(Members, Vec<bool>), MemberError> {
        let own = |found: &Found| match found {
            Found::Own(state) => Some(state.clone()),
            Found::New => None,
        };
        let mut members = Members { states: found.iter().map(own).collect() };
        let newest = members.newest();
        let present: Vec<DeviceId> = members.present().collect();
        let kept: Vec<DeviceId> = match newest.first() {
            Some(list) => present.iter().copied().filter(|id| list.ids.contains(id)).collect(),
            None => vec![],
        };
        // Only those that stay can decide: the others get new numbers.
        let has_quorum = newest.iter().all(|list| list.has_quorum(|id| kept.contains(&id)));
        // Excluded directories are no node by themselves: the others may be one.
        if !has_quorum || (newest.is_empty() && !present.is_empty()) {
            let listed = newest.first().map_or(0, |list| list.ids.len());
            return Err(MemberError::NoQuorum { present: kept.len(), members: listed });
        }
        // First the list without the missing ones: it does not need those that get new numbers.
        if !kept.is_empty() {
            members.change(files, &kept)?;
        }
        let is_kept =
            |state: &Option<MemberState>| state.as_ref().is_some_and(|state| kept.contains(&state.id));
        let is_kept: Vec<bool> = members.states.iter().map(is_kept).collect();
        // The old ones first: the first one decides if half of them are missing.
        let mut all = kept;
        for (directory, found) in found.iter().enumerate().filter(|&(directory, _)| !is_kept[directory]) {
            let promised = match found {
                Found::New => 0,
                Found::Own(state) => state.promised,
            };
            let state = MemberState { promised, ..MemberState::unlisted(random_id()) };
            all.push(state.id);
            let failed = |source| MemberError::Write { directory, source };
            // The new number before it is emptied: a part of its files must not be taken for all of them. And before others
            // list it: after an interruption, its vote counts.
            files.write(directory, &state).map_err(failed)?;
            if matches!(found, Found::Own(_)) {
                files.empty(directory).map_err(failed)?;
            }
            members.states[directory] = Some(state);
        }
        members.change(files, &all)?;
        Ok((members, is_kept))
    }

    /// Excludes directories. The others must have a quorum.
    pub(super) fn exclude(
        &mut self,
        files: &mut dyn MemberFiles,
        directories: &[usize],
    ) -> Result<(), MemberError> {
        let newest = self.newest();
        let mut rest = Members { states: self.states.clone() };
        directories.iter().for_each(|&directory| rest.states[directory] = None);
        let ids: Vec<DeviceId> = rest.present().collect();
        if !newest.iter().all(|list| list.has_quorum(|id| ids.contains(&id))) {
            let members = newest.first().map_or(0, |list| list.ids.len());
            return Err(MemberError::NoQuorum { present: ids.len(), members });
        }
        let result = rest.change(files, &ids);
        // Also after a failure: what was written counts.
        for (state, changed) in self.states.iter_mut().zip(rest.states) {
            if changed.is_some() || result.is_ok() {
                *state = changed;
            }
        }
        result
    }

    fn present(&self) -> impl Iterator<Item = DeviceId> {
        self.states.iter().flatten().map(|state| state.id)
    }

    /// Returns the newest list that is present, and those that it replaces.
    fn newest(&self) -> Vec<MemberList> {
        // Of two with the same number, the one without others is complete.
        let newest =
            self.states.iter().flatten().max_by_key(|state| (state.number(), usize::MAX - state.lists.len()));
        newest.map(|state| state.lists.clone()).unwrap_or_default()
    }

    /// Puts a list into force. A failure leaves either the old or the new one in force.
    fn change(&mut self, files: &mut dyn MemberFiles, ids: &[DeviceId]) -> Result<(), MemberError> {
        let mut replaced = self.newest();
        let is_complete = |state: &MemberState| state.lists == replaced || !ids.contains(&state.id);
        if let [list] = &replaced[..]
            && list.ids == ids
            && self.states.iter().flatten().all(is_complete)
        {
            return Ok(());
        }
        let promised =
            self.states.iter().flatten().map(|state| state.promised.max(state.number().unwrap_or(0)));
        let number = promised.max().unwrap_or(0) + 1;
        let is_old = |state: &MemberState| replaced.iter().any(|list| list.ids.contains(&state.id));
        for directory in self.directories(is_old) {
            self.update(files, directory, |state| state.promised = number)?;
        }
        // The same list again replaces nothing.
        replaced.retain(|list| list.ids != ids);
        if replaced.len() >= LISTS_MAX {
            return Err(MemberError::TooMany);
        }
        let list = MemberList { number, ids: ids.to_vec() };
        let joint: Vec<MemberList> = std::iter::once(list.clone()).chain(replaced.iter().cloned()).collect();
        // New ones first: once an old one has the list, a start needs a quorum of it.
        let is_old = |state: &MemberState| replaced.iter().any(|list| list.ids.contains(&state.id));
        let mut listed = self.directories(|state| ids.contains(&state.id));
        listed.sort_by_key(|&directory| self.states[directory].as_ref().is_some_and(is_old));
        for &directory in &listed {
            self.update(files, directory, |state| {
                state.promised = number;
                state.lists.clone_from(&joint);
            })?;
        }
        for &directory in &listed {
            self.update(files, directory, |state| state.lists = vec![list.clone()])?;
        }
        Ok(())
    }

    /// Returns the directories whose states are selected.
    fn directories(&self, selected: impl Fn(&MemberState) -> bool) -> Vec<usize> {
        let is_selected = |&directory: &usize| self.states[directory].as_ref().is_some_and(&selected);
        (0..self.states.len()).filter(is_selected).collect()
    }

    fn update(
        &mut self,
        files: &mut dyn MemberFiles,
        directory: usize,
        change: impl FnOnce(&mut MemberState),
    ) -> Result<(), MemberError> {
        let Some(mut state) = self.states[directory].clone() else { return Ok(()) };
        change(&mut state);
        if self.states[directory].as_ref() == Some(&state) {
            return Ok(());
        }
        files.write(directory, &state).map_err(|source| MemberError::Write { directory, source })?;
        self.states[directory] = Some(state);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
