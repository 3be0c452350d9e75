//! What a node decides: pure code. No clock, no I/O, no lock and no runtime; time and what the heap said arrive as
//! arguments, and what is to be done is returned.
//!
//! Reading order: [`plan`] (which segments there are), [`groups`] (whom they are for), [`books`] (what is in them), [`orders`] (what a master's order
//! means), [`outgoing`] and [`report`] (what is said to the master, and in which order), [`touch`] (what was read),
//! [`pace`] (when), [`batch`] (what is written to disk together, and how fast), [`notice`] (what is said of the disk, and to whom).

pub mod batch;
pub mod books;
pub mod groups;
pub mod notice;
pub mod orders;
pub mod outgoing;
pub mod pace;
pub mod plan;
pub mod report;
pub mod touch;
