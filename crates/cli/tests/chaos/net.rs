//! [`Net`]: a network namespace per host, joined by a bridge, and partitions between them.
//!
//! A partition silently drops packets, by `nft` in the receiving namespace. Each direction is separate.

#![allow(dead_code, reason = "each test uses its own part")]

use std::collections::BTreeSet;
use std::fs::File;
use std::process::Command;

use rustix::fd::AsFd;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A host: suffix of the name of its namespace, and last byte of its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    pub name: String,
    pub number: u8,
}

impl Host {
    pub fn new(name: impl Into<String>, number: u8) -> Host {
        Host { name: name.into(), number }
    }

    pub fn ip(&self) -> String {
        format!("10.79.0.{}", self.number)
    }
}

/// Returns the missing requirement of this test, if any.
pub fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("creating network namespaces needs root");
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return Some("needs ip (iproute2)");
    }
    if Command::new("nft").arg("-v").output().is_err() {
        return Some("needs nft (nftables)");
    }
    match Command::new("unshare").args(["--net", "true"]).output() {
        Ok(made) if made.status.success() => None,
        _ => Some("cannot create network namespaces"),
    }
}

/// Prefix of all names, to find namespaces of killed runs.
const PREFIX: &str = "mx";
const BRIDGE: &str = "s";
/// Address of the bridge, where the test runs.
const WATCHER: &str = "10.79.0.254";

/// The namespaces. Removed on drop.
#[derive(Debug)]
pub struct Net {
    prefix: String,
    hosts: Vec<Host>,
    /// Pairs whose packets are dropped: from, to.
    cuts: BTreeSet<(u8, u8)>,
}

#[track_caller]
fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Net {
    /// Creates the namespaces, and moves this thread to that of the bridge, which is never partitioned.
    pub fn new(hosts: &[Host]) -> Net {
        sweep();
        let net = Net {
            prefix: format!("{PREFIX}{}", std::process::id()),
            hosts: hosts.to_vec(),
            cuts: BTreeSet::new(),
        };
        let at = |name: &str| format!("{}{name}", net.prefix);
        let bridge = at(BRIDGE);
        ip(&format!("netns add {bridge}"));
        ip(&format!("-n {bridge} link add bridge type bridge"));
        ip(&format!("-n {bridge} address add {WATCHER}/24 dev bridge"));
        ip(&format!("-n {bridge} link set bridge up"));
        ip(&format!("-n {bridge} link set lo up"));
        for host in hosts {
            let side = at(&host.name);
            ip(&format!("netns add {side}"));
            ip(&format!("link add eth netns {side} type veth peer name p{} netns {bridge}", host.name));
            ip(&format!("-n {side} address add {}/24 dev eth", host.ip()));
            ip(&format!("-n {side} link set eth up"));
            ip(&format!("-n {side} link set lo up"));
            ip(&format!("-n {bridge} link set p{} master bridge", host.name));
            ip(&format!("-n {bridge} link set p{} up", host.name));
            let chains =
                [("comes", "input"), ("alone_in", "input"), ("alone_out", "output")].map(|(name, hook)| {
                    format!(
                        "add chain inet cut {name} {{ type filter hook {hook} priority 0; policy accept; }}"
                    )
                });
            net.nft(host, &format!("add table inet cut; {}", chains.join("; ")));
        }
        let file = File::open(format!("/run/netns/{bridge}")).expect("the namespace exists");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("setns");
        net
    }

    /// Command prefix that starts a program on a host.
    pub fn inside(&self, host: &Host) -> Vec<String> {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}{}", self.prefix, host.name)].into()
    }

    fn nft(&self, host: &Host, rules: &str) {
        let words = self.inside(host);
        let output = Command::new(&words[0]).args(&words[1..]).args(["nft", rules]).output();
        let output = output.expect("nft runs");
        assert!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Drops packets from one host to another.
    pub fn cut(&mut self, from: &Host, to: &Host) {
        if self.cuts.insert((from.number, to.number)) {
            self.nft(to, &format!("add rule inet cut comes ip saddr {} drop", from.ip()));
        }
    }

    /// Drops all packets of a host, except those of this test.
    pub fn isolate(&mut self, host: &Host) {
        let comes = format!("add rule inet cut alone_in iifname eth ip saddr != {WATCHER} drop");
        let goes = format!("add rule inet cut alone_out oifname eth ip daddr != {WATCHER} drop");
        self.nft(host, &format!("{comes}; {goes}"));
    }

    /// Drops all packets of a host, those of this test too.
    pub fn silence(&mut self, host: &Host) {
        self.nft(
            host,
            "add rule inet cut alone_in iifname eth drop; add rule inet cut alone_out oifname eth drop",
        );
    }

    /// Ends [`Net::isolate`] or [`Net::silence`] of a host.
    pub fn heal_host(&mut self, host: &Host) {
        self.nft(host, "flush chain inet cut alone_in; flush chain inet cut alone_out");
    }

    /// Ends all partitions between pairs.
    pub fn heal(&mut self) {
        let cut: BTreeSet<u8> = std::mem::take(&mut self.cuts).into_iter().map(|(_, to)| to).collect();
        for host in self.hosts.iter().filter(|host| cut.contains(&host.number)) {
            self.nft(host, "flush chain inet cut comes");
        }
    }

    /// Ends the partition between two hosts, in both directions.
    pub fn heal_pair(&mut self, one: &Host, other: &Host) {
        for (from, to) in [(one, other), (other, one)] {
            if !self.cuts.remove(&(from.number, to.number)) {
                continue;
            }
            self.nft(to, "flush chain inet cut comes");
            for cut in self.cuts.iter().filter(|cut| cut.1 == to.number) {
                self.nft(to, &format!("add rule inet cut comes ip saddr 10.79.0.{} drop", cut.0));
            }
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in self.hosts.iter().map(|host| &host.name[..]).chain([BRIDGE]) {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{name}", self.prefix)]).status();
        }
    }
}

/// Removes namespaces of killed runs.
fn sweep() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let rest = name.strip_prefix(PREFIX).unwrap_or_default();
        let pid: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if !pid.is_empty() && !std::path::Path::new(&format!("/proc/{pid}")).exists() {
            let _ = Command::new("ip").args(["netns", "del", &name]).status();
        }
    }
}
