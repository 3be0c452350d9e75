//! Random starts with any directories, failing writes and emptied directories; and single histories.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Directories that survive the processes of a node, and what was removed from it.
#[derive(Debug, Default)]
struct World {
    directories: BTreeMap<usize, Directory>,
    removed: BTreeSet<(u32, u64)>,
    nodes: u32,
    keys: u64,
}

#[derive(Clone, Debug, Default)]
struct Directory {
    node: Option<u32>,
    state: Option<MemberState>,
    keys: BTreeSet<u64>,
    /// Removed keys whose records are still there, under a log of the removals.
    removed: BTreeSet<u64>,
}

/// The directories that a process uses, some writes of which fail.
struct Files<'a> {
    world: &'a mut World,
    used: &'a [usize],
    rng: &'a mut Rng,
    /// A write fails with a probability of 1 in this number.
    fails: u64,
    has_ended: bool,
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

impl Files<'_> {
    /// Returns whether the write reaches the directory, and whether it is known.
    fn luck(&mut self) -> (bool, io::Result<()>) {
        let failed = Err(io::Error::other("injected"));
        if self.has_ended {
            return (false, failed);
        }
        if self.rng.below(self.fails) > 0 {
            return (true, Ok(()));
        }
        self.has_ended = self.rng.below(2) == 0;
        (self.rng.below(2) == 0, failed)
    }
}

impl MemberFiles for Files<'_> {
    fn write(&mut self, directory: usize, state: &MemberState) -> io::Result<()> {
        let (reaches, result) = self.luck();
        if reaches {
            let read = MemberState::from_text(&state.to_text());
            assert_eq!(read.as_ref(), Some(state));
            self.world.directories.get_mut(&self.used[directory]).unwrap().state = read;
        }
        result
    }

    fn empty(&mut self, directory: usize) -> io::Result<()> {
        let (reaches, result) = self.luck();
        let directory = self.world.directories.get_mut(&self.used[directory]).unwrap();
        if result.is_ok() {
            directory.keys.clear();
            directory.removed.clear();
        } else if reaches {
            // The log is gone, and the records are not.
            directory.keys.append(&mut directory.removed);
        }
        result
    }
}

/// How a run of a process ended, for the statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Run {
    OtherNode,
    NoQuorum,
    Failed,
    Warm,
    Cold,
    Excluded,
}

/// Runs a process on some of the directories: it puts and removes keys, and excludes directories.
fn run(world: &mut World, count: u64, rng: &mut Rng) -> Run {
    let mut used: Vec<usize> = (0..count as usize).filter(|_| rng.below(4) > 0).collect();
    if used.is_empty() {
        return Run::Failed;
    }
    if rng.below(4) == 0 {
        used.reverse();
    }
    let nodes: BTreeSet<u32> = used.iter().filter_map(|at| world.directories[at].node).collect();
    if nodes.len() > 1 {
        return Run::OtherNode;
    }
    let node = nodes.first().copied().unwrap_or_else(|| {
        world.nodes += 1;
        world.nodes
    });
    let mut next_id = rng.next();
    let mut random_id = || {
        next_id = next_id.wrapping_add(1);
        DeviceId(next_id)
    };
    let states = used.iter().map(|at| &world.directories[at]);
    let states: Vec<_> =
        states.map(|directory| (directory.node.is_some(), directory.state.clone())).collect();
    let found = Found::of(&states, &mut random_id);
    let fails = [4, 12, 40, 1 << 20][rng.below(4) as usize];
    // As for a node with one directory that never had more.
    let is_plain = used.len() == 1 && world.directories[&used[0]].state.is_none();
    let mut files = Files { world, used: &used, rng, fails, has_ended: false };
    let (mut members, kept) = if is_plain {
        let states = vec![Some(MemberState::single(DeviceId(1)))];
        (Members { states }, vec![matches!(found[0], Found::Own(_))])
    } else {
        match Members::start(&found, &mut files, random_id) {
            Ok(started) => started,
            Err(MemberError::NoQuorum { .. }) => return Run::NoQuorum,
            Err(MemberError::Write { .. } | MemberError::TooMany) => return Run::Failed,
        }
    };
    for &at in &used {
        if files.rng.below(fails) == 0 {
            return Run::Failed;
        }
        let directory = files.world.directories.get_mut(&at).unwrap();
        if directory.node.is_none() {
            *directory =
                Directory { node: Some(node), state: directory.state.take(), ..Directory::default() };
        }
    }
    let mut is_member = vec![true; used.len()];
    let mut result = if kept.iter().any(|kept| *kept) { Run::Warm } else { Run::Cold };
    for _ in 0..files.rng.below(20) {
        let on: Vec<usize> = (0..used.len()).filter(|&n| is_member[n]).collect();
        let one = on[files.rng.below(on.len() as u64) as usize];
        for &n in &on {
            let directory = &files.world.directories[&used[n]];
            let returned = directory.keys.iter().find(|key| files.world.removed.contains(&(node, **key)));
            assert_eq!(returned, None, "a removed key is back in directory {}: {:?}", used[n], files.world);
        }
        match files.rng.below(8) {
            0..4 => {
                files.world.keys += 1;
                let key = files.world.keys;
                files.world.directories.get_mut(&used[one]).unwrap().keys.insert(key);
            }
            4..7 => {
                let keys = on.iter().flat_map(|n| files.world.directories[&used[*n]].keys.clone());
                let keys: Vec<u64> = keys.collect();
                // Also keys that are not here: they may be in a directory that is not used.
                let any = files.rng.below(files.world.keys + 1);
                let at = files.rng.below(keys.len() as u64 + 1) as usize;
                let key = keys.get(at).copied().unwrap_or(any);
                for n in on {
                    let directory = files.world.directories.get_mut(&used[n]).unwrap();
                    if directory.keys.remove(&key) {
                        directory.removed.insert(key);
                    }
                }
                files.world.removed.insert((node, key));
            }
            _ if on.len() > 1 && !is_plain => {
                let mut excluded = vec![one];
                let other = on[files.rng.below(on.len() as u64) as usize];
                if other != one && on.len() > 2 && files.rng.below(2) == 0 {
                    excluded.push(other);
                }
                if members.exclude(&mut files, &excluded).is_ok() {
                    excluded.iter().for_each(|&n| is_member[n] = false);
                    result = Run::Excluded;
                }
                if files.has_ended {
                    return result;
                }
            }
            _ => {}
        }
    }
    result
}

#[test]
fn removed_keys_do_not_return_with_any_directories() {
    let rounds =
        std::env::var("MOONTIDE_MEMBER_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(400);
    let mut runs: BTreeMap<Run, u64> = BTreeMap::new();
    for seed in 0..rounds {
        println!("seed {seed}");
        let mut rng = Rng(seed);
        let count = 1 + rng.below(5);
        let mut world = World::default();
        world.directories.extend((0..count as usize).map(|at| (at, Directory::default())));
        for _ in 0..40 {
            *runs.entry(run(&mut world, count, &mut rng)).or_default() += 1;
            if rng.below(12) == 0 {
                let emptied = rng.below(count) as usize;
                world.directories.insert(emptied, Directory::default());
            }
        }
    }
    println!("{runs:?}");
    let least = [Run::NoQuorum, Run::Failed, Run::Warm, Run::Cold, Run::Excluded];
    assert!(least.iter().all(|run| runs.get(run).is_some_and(|count| *count > rounds)), "{runs:?}");
}

/// Files whose `good` next writes succeed.
struct Limited<'a> {
    states: &'a mut [Option<MemberState>],
    used: &'a [usize],
    good: usize,
}

impl MemberFiles for Limited<'_> {
    fn write(&mut self, directory: usize, state: &MemberState) -> io::Result<()> {
        self.good = self.good.checked_sub(1).ok_or_else(|| io::Error::other("injected"))?;
        self.states[self.used[directory]] = Some(state.clone());
        Ok(())
    }

    fn empty(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

/// Regression: those that get new numbers were counted for the quorum of a list that was not complete.
#[test]
fn directories_that_do_not_stay_do_not_decide() {
    let state = |id| MemberState { id: DeviceId(id), promised: 5, lists: vec![list(5, &[1, 2, 3])] };
    let mut states = [Some(state(1)), Some(state(2)), Some(state(3))];
    // The exclusion of the third reaches the first one only: two promises and one list.
    let mut files = Limited { states: &mut states, used: &[0, 1, 2], good: 3 };
    let mut members = Members { states: files.states.to_vec() };
    members.exclude(&mut files, &[2]).unwrap_err();
    assert_eq!(states.each_ref().map(|state| state.as_ref().unwrap().lists.len()), [2, 1, 1]);
    let found = [0, 2].map(|at: usize| Found::Own(states[at].clone().unwrap()));
    let mut files = Limited { states: &mut states, used: &[0, 2], good: usize::MAX };
    let error = Members::start(&found, &mut files, || DeviceId(9)).unwrap_err();
    assert!(matches!(error, MemberError::NoQuorum { present: 1, members: 2 }), "{error:?}");
}

/// Regression: a join that ended after some directories had the list could not be repeated.
#[test]
fn interrupted_join_can_be_repeated() {
    for count in 2..10 {
        let used: Vec<usize> = (0..count).collect();
        // A promise, a number for each new one, the list with the one before, and the list alone.
        let all = 1 + (count - 1) + 2 * count;
        for good in 0..=all {
            let mut states = vec![None; count];
            states[0] = Some(MemberState::single(DeviceId(1)));
            let mut files = Limited { states: &mut states, used: &used, good };
            let mut found = vec![Found::New; count];
            found[0] = Found::Own(MemberState::single(DeviceId(1)));
            let mut last = 1;
            let mut next_id = || {
                last += 1;
                DeviceId(last)
            };
            let first = Members::start(&found, &mut files, &mut next_id);
            assert_eq!(first.is_ok(), good == all, "{good} of {all}");
            let states: Vec<_> =
                files.states.iter().cloned().zip(0..).map(|(state, at)| (at == 0, state)).collect();
            let found = Found::of(&states, &mut next_id);
            files.good = usize::MAX;
            let (_, kept) = Members::start(&found, &mut files, next_id).unwrap();
            assert!(kept[0], "{good} of {all}");
        }
    }
}

fn list(number: u64, ids: &[u64]) -> MemberList {
    MemberList { number, ids: ids.iter().copied().map(DeviceId).collect() }
}

#[test]
fn two_quorums_have_a_directory_in_common() {
    for count in 1..=6u64 {
        let all: Vec<u64> = (0..count).collect();
        let list = list(1, &all);
        let quorums: Vec<u64> =
            (0..1 << count).filter(|set| list.has_quorum(|id| set >> id.0 & 1 == 1)).collect();
        assert!(quorums.contains(&((1 << count) - 1)));
        assert!(quorums.iter().all(|a| quorums.iter().all(|b| a & b != 0)), "{count}");
    }
    assert!(list(1, &[4, 5]).has_quorum(|id| id.0 == 4));
    assert!(!list(1, &[4, 5]).has_quorum(|id| id.0 == 5));
}

#[test]
fn malformed_states_are_refused() {
    let state = MemberState { id: DeviceId(7), promised: 9, lists: vec![list(3, &[7, 8]), list(2, &[7])] };
    let text = state.to_text();
    assert_eq!(MemberState::from_text(&text), Some(state));
    assert_eq!(MemberState::from_text(&MemberState::unlisted(DeviceId(1)).to_text()).unwrap().lists, []);
    for end in 0..text.len() {
        assert_eq!(MemberState::from_text(&text[..end]), None, "{end}");
    }
    let replaced = |from: &str, to: &str| MemberState::from_text(&text.replace(from, to));
    assert_eq!(replaced("version 1", "version 2"), None);
    assert_eq!(replaced("list 3 0", "list 3\nlist 0"), None, "an empty list");
    assert_eq!(replaced("0007", "7"), None, "a short number");
    assert_eq!(replaced("end", &format!("{}end", "list 1 0000000000000001\n".repeat(65))), None, "too long");
}
