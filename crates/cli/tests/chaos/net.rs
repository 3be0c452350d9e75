//! [`Net`]: a network namespace for each host, all joined by a bridge, and cuts between them.
//!
//! A cut loses packets without a word, by `nft` in the namespace that would receive them. Each direction is cut by itself.

use std::collections::BTreeSet;
use std::fs::File;
use std::process::Command;

use rustix::fd::AsFd;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A host: what stands behind the name of its namespace, and the last number of its address.
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

/// Why this test cannot run here.
pub fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("it makes network namespaces, for which it needs to be root");
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return Some("it needs ip (iproute2)");
    }
    if Command::new("nft").arg("-v").output().is_err() {
        return Some("it needs nft (nftables)");
    }
    match Command::new("unshare").args(["--net", "true"]).output() {
        Ok(made) if made.status.success() => None,
        _ => Some("network namespaces cannot be made here"),
    }
}

/// In front of all names, so that what was left behind is found.
const PREFIX: &str = "mx";
const BRIDGE: &str = "s";
/// The address of the bridge, where the test sits.
const WATCHER: &str = "10.79.0.254";

/// The namespaces. Gone when it is dropped.
#[derive(Debug)]
pub struct Net {
    prefix: String,
    hosts: Vec<Host>,
    /// Pairs whose packets are lost: from, to.
    cuts: BTreeSet<(u8, u8)>,
}

#[track_caller]
fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Net {
    /// Makes them, and moves this thread to where the bridge is: it reaches all hosts, and no cut is between.
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
        let file = File::open(format!("/run/netns/{bridge}")).expect("the namespace was just made");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("setns");
        net
    }

    /// Words that start a program at a host.
    pub fn inside(&self, host: &Host) -> Vec<String> {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}{}", self.prefix, host.name)].into()
    }

    fn nft(&self, host: &Host, rules: &str) {
        let words = self.inside(host);
        let output = Command::new(&words[0]).args(&words[1..]).args(["nft", rules]).output();
        let output = output.expect("nft runs");
        assert!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// From here on packets from one to the other are lost.
    pub fn cut(&mut self, from: &Host, to: &Host) {
        if self.cuts.insert((from.number, to.number)) {
            self.nft(to, &format!("add rule inet cut comes ip saddr {} drop", from.ip()));
        }
    }

    /// From here on nobody hears a host, and it hears nobody; but for this test, which looks on.
    pub fn isolate(&mut self, host: &Host) {
        let comes = format!("add rule inet cut alone_in iifname eth ip saddr != {WATCHER} drop");
        let goes = format!("add rule inet cut alone_out oifname eth ip daddr != {WATCHER} drop");
        self.nft(host, &format!("{comes}; {goes}"));
    }

    /// Everybody hears a host again, and it them.
    pub fn heal_host(&mut self, host: &Host) {
        self.nft(host, "flush chain inet cut alone_in; flush chain inet cut alone_out");
    }

    /// Nothing is lost any more.
    pub fn heal(&mut self) {
        let cut: BTreeSet<u8> = std::mem::take(&mut self.cuts).into_iter().map(|(_, to)| to).collect();
        for host in self.hosts.iter().filter(|host| cut.contains(&host.number)) {
            self.nft(host, "flush chain inet cut comes");
        }
    }

    /// Packets between two hosts arrive again, in both directions.
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

/// Takes away what a run that was killed has left.
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
