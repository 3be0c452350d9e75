//! The storm: one heap, many processes, and somebody who kills them at random with `kill -9`.
//!
//! ```text
//!   conductor (this test) ── SIGKILL, SIGSTOP, SIGCONT ──▶ writers, readers, reclaimer
//!        ▲  ▲                                                       │ door: begin, commit, kill, reclaim
//!        │  └─────────────── one pipe: tallies, wrong bytes ────────┤
//!        └── control socket: who is gone, final books ── owner ◀────┘
//! ```
//!
//! All of them are this binary, started again with a role. What must hold, whatever is killed or stopped when:
//! no reader ever sees a wrong byte; what a dead process held is free within a second; at the end no slot,
//! unit, index entry, ledger, descriptor or mapping is left; and the bytes under the guards of a stopped
//! process stay. A second test plants a bug into the owner and demands that the storm sees it.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_STORM_KILLS` | how many kills; 220 unless told, 1000 for the long form |
//! | `MOONTIDE_STORM_PLANT=forget-living` | plants the bug into the first test, which then must fail |
//!
//! There is no libtest here, because children must start bare.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

mod common;

#[path = "storm/clients.rs"]
mod clients;
#[path = "storm/conductor.rs"]
mod conductor;
#[path = "storm/owner.rs"]
mod owner;
#[path = "storm/payload.rs"]
mod payload;
#[path = "storm/wire.rs"]
mod wire;

use std::process::ExitCode;

use wire::Role;

const TESTS: [(&str, fn()); 2] = [
    ("killed_and_stopped_processes_neither_harm_nor_leak", conductor::storm_holds),
    ("a_node_that_forgets_a_living_client_is_found_out", conductor::planted_bug_is_seen),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = Role::from_arguments(&arguments) {
        wire::die_with_parent(role.parent());
        match role {
            Role::Owner { plant, .. } => owner::run(plant),
            Role::Client { kind, door, seed, .. } => clients::run(kind, &door, seed),
        }
    }
    common::libtest::run(&TESTS, &arguments)
}
