//! Addresses of this host, and the choice of address pairs that form rails.
//!
//! Owns three queries, [`local_addresses`], [`current_numa_node`] and the sysfs attributes of an interface, and one
//! decision, [`pair`], which is pure. Does not open sockets, and does not query routes: where there is no good reason
//! for a local address, the kernel chooses it by its routes.
//!
//! Invariants of [`pair`]: at most [`RAILS_MAX`] rails; a local address has the family of its peer, and is a loopback
//! address exactly if its peer is; it is one of `bind` if that list is not empty; equal arguments give equal rails.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

/// Most rails between two nodes. The largest hosts have eight NICs for data; twice that allows two ports each. More
/// addresses in an announcement are suspicious, and must not cause an unbounded number of connections.
pub const RAILS_MAX: usize = 16;

/// Most addresses considered. Hosts of containers have hundreds of interfaces, few of them with their own address.
const ADDRESSES_MAX: usize = 1024;

/// Most bytes read from a sysfs file. Each file has one short line; a list of nodes with gaps is the longest.
const SYSFS_BYTES_MAX: u64 = 4096;

const SYSFS: &str = "/sys";

/// Address of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// IP address.
    pub ip: IpAddr,
    /// Name of the interface with this address.
    pub interface: String,
    /// NUMA node of the interface's device, if known.
    pub numa: Option<u32>,
    /// Speed of the link, if known.
    pub speed_mbps: Option<u32>,
    /// Whether the address is a loopback address. A routable address may be on the loopback interface too, on hosts
    /// that announce themselves by a routing protocol; it does not count as a loopback address.
    pub loopback: bool,
    /// Length of the subnet prefix in bits.
    pub prefix_len: u8,
    /// Whether the interface has a hardware device. Bridges, tunnels and the like have none.
    pub device: bool,
}

impl LocalAddress {
    /// Returns whether `ip` is in the subnet of this address. An empty prefix is not a subnet; otherwise every address
    /// would be in it.
    fn has_in_subnet(&self, ip: IpAddr) -> bool {
        let differing_from = match (self.ip, ip) {
            (IpAddr::V4(local), IpAddr::V4(other)) => (local.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(local), IpAddr::V6(other)) => (local.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => return false,
        };
        self.prefix_len > 0 && differing_from >= u32::from(self.prefix_len)
    }
}

/// Both ends of a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailAddress {
    /// Local address to bind to before connecting; `None`: the kernel chooses it.
    pub local: Option<IpAddr>,
    /// Address to connect to. An IPv4-mapped IPv6 address is converted to IPv4, so the family is that of `local`.
    pub peer: SocketAddr,
    /// NUMA node of the local end, if known.
    pub numa: Option<u32>,
}

/// Returns one rail per address of `peer`, each from the most suitable local address.
///
/// If `bind` is not empty, only its addresses are used. The most suitable address is in the peer's subnet, and among
/// those on a NIC with the fewest rails so far. Peers in other subnets are reached through a router, and their rails
/// are spread over NICs in turn. But replies may not find their way back to a source address that the operator did not
/// name, so without `bind`
/// - only interfaces with a device are used: the address of a container bridge is known only to this host;
/// - a single rail is not spread: that gains nothing, and the chosen source might not reach the peer.
///
/// If no local address suits a rail, the kernel chooses. Duplicate addresses make one rail, and addresses after the
/// first [`RAILS_MAX`] none.
pub fn pair(local: &[LocalAddress], peer: &[SocketAddr], bind: &[IpAddr]) -> Vec<RailAddress> {
    // The unspecified address names no address: 0.0.0.0 means the same as an empty list.
    let bind: Vec<IpAddr> = bind.iter().filter(|ip| !ip.is_unspecified()).map(IpAddr::to_canonical).collect();
    let mut peers: Vec<SocketAddr> = vec![];
    for peer in peer.iter().map(canonical) {
        if peers.len() < RAILS_MAX && !peers.contains(&peer) {
            peers.push(peer);
        }
    }
    let allowed: Vec<&LocalAddress> =
        local.iter().filter(|address| bind.is_empty() || bind.contains(&address.ip)).collect();
    let mut chosen: Vec<Option<&LocalAddress>> = vec![None; peers.len()];

    // Peers in local subnets first: they have less choice than those behind a router.
    for (index, peer) in peers.iter().enumerate() {
        let neighbours = allowed.iter().filter(|address| {
            address.loopback == peer.ip().is_loopback() && address.has_in_subnet(peer.ip())
        });
        // The kernel would route to the narrowest subnet.
        let narrowest = neighbours.clone().map(|address| address.prefix_len).max();
        let nearest = neighbours.filter(|address| Some(address.prefix_len) == narrowest);
        chosen[index] = least_used(nearest.copied(), &chosen);
    }

    let routed: Vec<usize> =
        (0..peers.len()).filter(|&index| chosen[index].is_none() && is_routed(peers[index].ip())).collect();
    for &index in &routed {
        let is_ipv4 = peers[index].is_ipv4();
        let of_family = routed.iter().filter(|&&other| peers[other].is_ipv4() == is_ipv4).count();
        if of_family > 1 || !bind.is_empty() {
            let sources = allowed.iter().copied().filter(|address| {
                let trusted = address.device || !bind.is_empty();
                trusted && is_routed(address.ip) && address.ip.is_ipv4() == is_ipv4
            });
            chosen[index] = least_used(sources, &chosen);
        }
    }

    let ends = peers.into_iter().zip(chosen);
    ends.map(|(peer, local)| RailAddress {
        local: local.map(|address| address.ip),
        peer,
        numa: local.and_then(|address| address.numa),
    })
    .collect()
}

/// Returns the first of the addresses whose NIC has the fewest rails and which have the fewest themselves.
fn least_used<'a>(
    suitable: impl Iterator<Item = &'a LocalAddress>,
    chosen: &[Option<&'a LocalAddress>],
) -> Option<&'a LocalAddress> {
    suitable.min_by_key(|address| {
        let used = chosen.iter().flatten();
        let of_interface = used.clone().filter(|other| other.interface == address.interface).count();
        (of_interface, used.filter(|other| other.ip == address.ip).count())
    })
}

/// Returns whether packets to or from `ip` can pass a router.
fn is_routed(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !link_local && !ip.is_loopback() && !ip.is_unspecified()
}

/// Converts an IPv4-mapped IPv6 address to IPv4. Others are unchanged: a link-local one needs its scope.
fn canonical(address: &SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => *address,
    }
}

/// Returns the addresses of the interfaces that are up, in the kernel's order; without link-local IPv6 addresses, which
/// have no meaning without an interface.
pub fn local_addresses() -> io::Result<Vec<LocalAddress>> {
    Ok(described(interface_addresses()?, Path::new(SYSFS)))
}

/// One address as returned by getifaddrs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct InterfaceAddress {
    /// Interface name, perhaps with the label of an alias, as in `eth0:1`.
    name: String,
    ip: IpAddr,
    prefix_len: u8,
}

/// Adds the attributes from sysfs, and removes addresses that cannot be used.
fn described(found: Vec<InterfaceAddress>, sysfs: &Path) -> Vec<LocalAddress> {
    let mut known: BTreeMap<String, InterfaceInfo> = BTreeMap::new();
    let usable = found.into_iter().filter(|address| match address.ip {
        IpAddr::V4(ip) => !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_unicast_link_local(),
    });
    usable
        .take(ADDRESSES_MAX)
        .map(|InterfaceAddress { name, ip, prefix_len }| {
            // The kernel allows no colon in a name: a label follows it.
            let interface = name.split(':').next().unwrap_or_default().to_owned();
            let info =
                *known.entry(interface.clone()).or_insert_with(|| InterfaceInfo::read(sysfs, &interface));
            let InterfaceInfo { numa, speed_mbps, device } = info;
            LocalAddress { ip, interface, numa, speed_mbps, loopback: ip.is_loopback(), prefix_len, device }
        })
        .collect()
}

/// Attributes of one interface from sysfs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct InterfaceInfo {
    numa: Option<u32>,
    speed_mbps: Option<u32>,
    device: bool,
}

impl InterfaceInfo {
    /// Reads the attributes. A missing, unreadable or malformed value is not an error: rails work without them.
    fn read(sysfs: &Path, interface: &str) -> InterfaceInfo {
        // The kernel allows no such name, but a path is built from it, and nothing outside the directory may be read.
        if matches!(interface, "" | "." | "..") || interface.contains(['/', '\0']) {
            return InterfaceInfo::default();
        }
        let directory = sysfs.join("class/net").join(interface);
        let number = |file: &str| -> Option<i64> { read_line(&directory.join(file))?.parse().ok() };
        InterfaceInfo {
            // -1 on a machine without NUMA nodes, or for a device without one.
            numa: number("device/numa_node").and_then(|node| u32::try_from(node).ok()),
            // -1 if unknown, which some kernels print as the largest u32; 0 also means unknown.
            speed_mbps: number("speed")
                .and_then(|mbps| u32::try_from(mbps).ok())
                .filter(|&mbps| mbps != 0 && mbps != u32::MAX),
            device: directory.join("device").exists(),
        }
    }
}

/// Returns the text of a file without surrounding white space; `None` if the file does not exist or is not text.
fn read_line(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(SYSFS_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// Returns the IPv4 and IPv6 addresses of interfaces that are up, from getifaddrs.
fn interface_addresses() -> io::Result<Vec<InterfaceAddress>> {
    /// Frees the list, also during a panic.
    struct List(*mut libc::ifaddrs);
    impl Drop for List {
        fn drop(&mut self) {
            // SAFETY: the list came from getifaddrs, and `List` is its only owner; no entry borrowed from it exists any
            // more, since entries live in the loop below, which ends before the list does.
            unsafe { libc::freeifaddrs(self.0) }
        }
    }

    let mut head = ptr::null_mut();
    // SAFETY: `head` is valid for the pointer that getifaddrs writes.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = List(head);

    let mut found = vec![];
    let mut next = list.0;
    // SAFETY: `next` is null or an entry of the list, which is not freed before `list` is dropped.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint == 0 || entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: the pointer is null or to a socket address of the list, with the length of its family.
        let Some(ip) = (unsafe { ip_of(entry.ifa_addr) }) else { continue };
        // SAFETY: as above; a netmask is given as a socket address too.
        let mask = unsafe { ip_of(entry.ifa_netmask) };
        // SAFETY: not null, as checked above, and getifaddrs terminates names with a zero.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push(InterfaceAddress {
            name: name.to_string_lossy().into_owned(),
            ip,
            prefix_len: prefix_len(ip, mask),
        });
    }
    Ok(found)
}

/// Returns the IP address in a socket address; `None` for other families.
///
/// # Safety
///
/// `address` is null, or points to a socket address that is readable for the length of its family.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and readable by the contract; unaligned reads need no alignment, here and below.
    let family = unsafe { ptr::addr_of!((*address).sa_family).read_unaligned() };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: by its family it is a `sockaddr_in`, for which all bytes are valid.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            // The bytes in memory are in network order, and `to_ne_bytes` returns them as they are.
            Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: by its family it is a `sockaddr_in6`, for which all bytes are valid.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Returns the leading ones of a netmask. Without a netmask of the right family, the address is alone in its subnet: it
/// is safer to treat a local peer as routed than a routed peer as local.
fn prefix_len(ip: IpAddr, mask: Option<IpAddr>) -> u8 {
    let bits = match (ip, mask) {
        (IpAddr::V4(_), Some(IpAddr::V4(mask))) => mask.to_bits().leading_ones(),
        (IpAddr::V6(_), Some(IpAddr::V6(mask))) => mask.to_bits().leading_ones(),
        (IpAddr::V4(_), _) => Ipv4Addr::BITS,
        (IpAddr::V6(_), _) => Ipv6Addr::BITS,
    };
    // At most 128.
    bits as u8
}

/// Returns the NUMA node that this thread currently runs on; `None` if the machine has only one, or if the kernel does
/// not report it. One system call on a machine with several nodes, none on others.
pub fn current_numa_node() -> Option<u32> {
    // Nodes are hardly ever added to or removed from a running machine, so the result is cached.
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    if !SEVERAL.get_or_init(|| has_several_nodes(Path::new(SYSFS))) {
        return None;
    }
    query_numa_node()
}

/// Asks the kernel, even on a machine with one node.
fn query_numa_node() -> Option<u32> {
    let mut node: libc::c_uint = 0;
    let no_cpu = ptr::null_mut::<libc::c_uint>();
    let no_cache = ptr::null_mut::<libc::c_void>();
    // SAFETY: getcpu writes an unsigned int to each of the first two pointers that is not null, and ignores the third.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, no_cpu, ptr::from_mut(&mut node), no_cache) };
    (result == 0).then_some(node)
}

/// Returns whether more than one NUMA node is online. A machine without this file has one.
fn has_several_nodes(sysfs: &Path) -> bool {
    // A list of numbers and ranges, such as `0`, `0-1` or `0,2-3`: only a single node has neither comma nor dash.
    read_line(&sysfs.join("devices/system/node/online")).is_some_and(|online| online.contains([',', '-']))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::{select, subsequence};

    use super::*;

    /// Parses `eth0=10.0.0.5/24`, with `~` in front if there is no device.
    fn address(text: &str) -> LocalAddress {
        let (name, address) = text.split_once('=').unwrap();
        let (ip, prefix_len) = address.split_once('/').unwrap();
        let ip: IpAddr = ip.parse().unwrap();
        let interface = name.trim_start_matches('~').to_owned();
        // ethN is on node N.
        let numa = interface.strip_prefix("eth").and_then(|node| node.parse().ok());
        LocalAddress {
            ip,
            interface,
            numa,
            speed_mbps: None,
            loopback: ip.is_loopback(),
            prefix_len: prefix_len.parse().unwrap(),
            device: !name.starts_with('~') && !ip.is_loopback(),
        }
    }

    /// Parses an address with a port, or one without: then the port is 7.
    fn socket(text: &str) -> SocketAddr {
        text.parse().unwrap_or_else(|_| SocketAddr::new(text.parse().unwrap(), 7))
    }

    /// Items of each list are separated by spaces; `-` is the kernel's choice.
    fn check(local: &str, peer: &str, bind: &str, expected: &str) {
        let local: Vec<LocalAddress> = local.split_whitespace().map(address).collect();
        let peer: Vec<SocketAddr> = peer.split_whitespace().map(socket).collect();
        let bind: Vec<IpAddr> = bind.split_whitespace().map(|ip| ip.parse().unwrap()).collect();
        let rails = pair(&local, &peer, &bind);
        let chosen: Vec<String> =
            rails.iter().map(|rail| rail.local.map_or("-".to_owned(), |ip| ip.to_string())).collect();
        assert_eq!(chosen.join(" "), expected, "{local:?} to {peer:?}, bound to {bind:?}");
        for rail in rails {
            let source = local.iter().find(|address| Some(address.ip) == rail.local);
            assert_eq!(rail.numa, source.and_then(|address| address.numa));
        }
    }

    const TWO: &str = "lo=127.0.0.1/8 eth0=10.0.0.5/24 eth1=10.0.1.5/24 lo=::1/128 eth0=fd00::5/64";

    #[test]
    fn peer_on_local_subnet_is_reached_through_that_subnet() {
        check(TWO, "10.0.1.9 10.0.0.9", "", "10.0.1.5 10.0.0.5");
        check(TWO, "[fd00::9]:1", "", "fd00::5");
        check(TWO, "[::ffff:10.0.1.9]:1", "", "10.0.1.5");
        check("eth0=10.0.0.5/8 eth1=10.1.0.5/16", "10.1.0.9 10.2.0.9", "", "10.1.0.5 10.0.0.5");
        check("eth0=10.0.0.0/31 eth1=10.0.0.2/31", "10.0.0.1 10.0.0.3", "", "10.0.0.0 10.0.0.2");
        check("~docker0=172.17.0.1/16", "172.17.0.9", "", "172.17.0.1");
    }

    #[test]
    fn nics_of_one_subnet_share_its_rails() {
        let local = "eth0=10.0.0.5/24 eth0=10.0.0.6/24 eth1=10.0.0.7/24";
        let peer = "10.0.0.11 10.0.0.12 10.0.0.13 10.0.0.14 10.0.0.15";
        check(local, peer, "", "10.0.0.5 10.0.0.7 10.0.0.6 10.0.0.7 10.0.0.5");
    }

    #[test]
    fn routed_rails_are_spread_over_nics() {
        check(TWO, "10.9.0.1 10.9.1.1 10.9.2.1", "", "10.0.0.5 10.0.1.5 10.0.0.5");
        // The peer in the local subnet keeps its NIC, though it is last.
        check(TWO, "10.9.0.1 10.9.1.1 10.0.0.9", "", "10.0.1.5 10.0.0.5 10.0.0.5");
    }

    #[test]
    fn single_routed_rail_leaves_source_to_kernel() {
        check(TWO, "10.9.0.1", "", "-");
        check(TWO, "10.9.0.1 [fd09::1]:1", "", "- -");
        check(TWO, "10.9.0.1 10.0.0.9 169.254.9.9", "", "- 10.0.0.5 -");
        check(TWO, "10.9.0.1", "10.0.1.5", "10.0.1.5");
    }

    #[test]
    fn interface_without_device_or_route_is_not_used_as_source() {
        let local = "~docker0=172.17.0.1/16 usb0=169.254.3.1/24 eth0=10.0.0.5/24";
        check(local, "10.9.0.1 10.9.1.1", "", "10.0.0.5 10.0.0.5");
        check("~docker0=172.17.0.1/16", "10.9.0.1 10.9.1.1", "", "- -");
        check("~docker0=172.17.0.1/16", "10.9.0.1 10.9.1.1", "172.17.0.1", "172.17.0.1 172.17.0.1");
        // A link-local peer has no route, and the kernel handles 0.0.0.0.
        check(TWO, "[fe80::1%3]:1 [fe80::2%3]:1 169.254.9.9 0.0.0.0", "", "- - - -");
    }

    #[test]
    fn loopback_pairs_only_with_loopback() {
        check(TWO, "127.0.0.1 127.0.0.2:9 [::1]:1", "", "127.0.0.1 127.0.0.1 ::1");
        check("eth0=10.0.0.5/24", "127.0.0.1 127.0.0.2", "10.0.0.5", "- -");
        check("lo=127.0.0.1/8", "10.0.0.5 10.0.0.6", "127.0.0.1", "- -");
        // Not even if the netmask includes both in one subnet.
        check("lo=127.0.0.1/1", "10.0.0.5", "", "-");
        check("eth0=126.0.0.5/7", "127.0.0.1", "", "-");
    }

    #[test]
    fn bind_list_restricts_source_addresses() {
        check(TWO, "10.0.0.9 10.0.1.9", "10.0.1.5", "10.0.1.5 10.0.1.5");
        check(TWO, "10.0.0.9 10.0.1.9", "::ffff:10.0.1.5", "10.0.1.5 10.0.1.5");
        check(TWO, "10.0.0.9 [fd00::9]:1", "fd00::5", "- fd00::5");
        check(TWO, "10.0.0.9", "10.7.7.7", "-");
        check(TWO, "10.0.0.9", "0.0.0.0", "10.0.0.5");
    }

    #[test]
    fn peer_list_is_deduplicated_and_capped() {
        check("", "", "", "");
        check("", "10.0.0.9 10.0.0.9 10.0.0.9:8", "", "- -");
        check("eth0=10.0.0.5/0", "11.0.0.9", "", "-");
        check("eth0=10.0.0.5/200", "10.0.0.5", "", "-");
        let many: Vec<String> = (1..=40).map(|host| format!("10.0.0.{host}")).collect();
        check("eth0=10.0.0.99/24", &many.join(" "), "", &["10.0.0.99"; RAILS_MAX].join(" "));
    }

    proptest! {
        #[test]
        fn paired_rails_match_family_loopback_and_bind_list(
            local in vec(select(vec![
                "lo=127.0.0.1/8", "lo=::1/128", "eth0=10.0.0.5/24", "eth0=10.0.0.6/24", "eth1=10.0.0.7/24",
                "eth1=10.1.0.7/16", "eth2=fd00::5/64", "eth3=fd00::6/64", "~docker0=172.17.0.1/16",
            ]), 0..12),
            peer in vec(select(vec![
                "127.0.0.1", "::1", "10.0.0.9", "10.0.0.10", "10.0.0.11", "10.1.3.3", "11.0.0.1", "11.0.0.2",
                "fd00::9", "fd01::1", "fd01::2", "fe80::1", "172.17.0.4", "::ffff:10.0.0.9", "0.0.0.0",
            ]), 0..40),
            bind in subsequence(vec!["10.0.0.6", "10.0.0.7", "fd00::6", "127.0.0.1", "1.2.3.4"], 0..=5),
            bound: bool,
        ) {
            let local: Vec<LocalAddress> = local.into_iter().map(address).collect();
            let peer: Vec<SocketAddr> = peer.into_iter().map(socket).collect();
            let bind: Vec<IpAddr> = bind.iter().filter(|_| bound).map(|ip| ip.parse().unwrap()).collect();
            let rails = pair(&local, &peer, &bind);
            prop_assert_eq!(&rails, &pair(&local, &peer, &bind));

            let mut distinct: Vec<SocketAddr> = peer.iter().map(canonical).collect();
            distinct.sort();
            distinct.dedup();
            prop_assert_eq!(rails.len(), distinct.len().min(RAILS_MAX));
            for rail in &rails {
                prop_assert!(distinct.contains(&rail.peer));
                let Some(ip) = rail.local else { continue };
                prop_assert!(local.iter().any(|address| address.ip == ip));
                prop_assert!(bind.is_empty() || bind.contains(&ip));
                prop_assert_eq!(ip.is_ipv4(), rail.peer.is_ipv4());
                prop_assert_eq!(ip.is_loopback(), rail.peer.ip().is_loopback());
            }
        }

        #[test]
        fn rails_are_spread_evenly_over_nics(nics in 1usize..8, peers in 2usize..=RAILS_MAX, same_subnet: bool) {
            let local: Vec<LocalAddress> =
                (0..nics).map(|nic| address(&format!("eth{nic}=10.0.0.{}/24", nic + 1))).collect();
            let net = if same_subnet { "10.0.0" } else { "10.9.0" };
            let peer: Vec<SocketAddr> =
                (0..peers).map(|host| socket(&format!("{net}.{}", host + 100))).collect();
            let rails = pair(&local, &peer, &[]);
            let uses: Vec<usize> = local
                .iter()
                .map(|nic| rails.iter().filter(|rail| rail.local == Some(nic.ip)).count())
                .collect();
            prop_assert_eq!(uses.iter().sum::<usize>(), peers);
            prop_assert!(uses.iter().max().unwrap() - uses.iter().min().unwrap() <= 1, "{:?}", uses);
        }
    }

    /// A directory with the layout of sysfs, removed at the end of the test.
    struct FakeSysfs(PathBuf);

    impl FakeSysfs {
        fn new(test: &str, files: &[(&str, &[u8])]) -> FakeSysfs {
            let root = std::env::temp_dir().join(format!("moontide-topology-{test}-{}", std::process::id()));
            for (path, content) in files {
                let path = root.join("sys").join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            FakeSysfs(root)
        }

        fn path(&self) -> PathBuf {
            self.0.join("sys")
        }
    }

    impl Drop for FakeSysfs {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn malformed_sysfs_values_and_interface_names_are_ignored() {
        fn info(numa: Option<u32>, speed_mbps: Option<u32>, device: bool) -> InterfaceInfo {
            InterfaceInfo { numa, speed_mbps, device }
        }
        let long = [b' '; 2 * SYSFS_BYTES_MAX as usize];
        let sysfs = FakeSysfs::new(
            "info",
            &[
                ("class/net/good/device/numa_node", b"1\n"),
                ("class/net/good/speed", b"100000\n"),
                ("class/net/unset/device/numa_node", b"-1\n"),
                ("class/net/unset/speed", b"-1\n"),
                ("class/net/old/speed", b"4294967295\n"),
                ("class/net/zero/speed", b"0\n"),
                ("class/net/odd/device/numa_node", b"\xff\xfe\n"),
                ("class/net/odd/speed", b"fast"),
                ("class/net/long/speed", &long),
                ("class/net/huge/speed", b"99999999999999999999"),
                ("class/net/dotted..name/speed", b"10"),
                // Files that a name with `..` would reach.
                ("speed", b"1"),
                ("class/speed", b"1"),
                ("class/net/speed", b"1"),
                ("class/net/device/numa_node", b"1"),
            ],
        );
        for (interface, expected) in [
            ("good", info(Some(1), Some(100_000), true)),
            ("unset", info(None, None, true)),
            ("old", info(None, None, false)),
            ("zero", info(None, None, false)),
            ("odd", info(None, None, true)),
            ("long", info(None, None, false)),
            ("huge", info(None, None, false)),
            ("dotted..name", info(None, Some(10), false)),
            ("absent", info(None, None, false)),
            ("", info(None, None, false)),
            (".", info(None, None, false)),
            ("..", info(None, None, false)),
            ("../..", info(None, None, false)),
            ("good/", info(None, None, false)),
            ("good/../good", info(None, None, false)),
            ("/", info(None, None, false)),
            ("go\0od", info(None, None, false)),
        ] {
            assert_eq!(InterfaceInfo::read(&sysfs.path(), interface), expected, "{interface:?}");
        }
    }

    #[test]
    fn local_addresses_carry_interface_numa_and_speed() {
        let sysfs = FakeSysfs::new(
            "addresses",
            &[("class/net/eth0/device/numa_node", b"0\n"), ("class/net/eth0/speed", b"25000\n")],
        );
        let found = |name: &str, ip: &str, prefix_len| InterfaceAddress {
            name: name.to_owned(),
            ip: ip.parse().unwrap(),
            prefix_len,
        };
        let listed = vec![
            found("lo", "127.0.0.1", 8),
            found("lo", "10.255.0.1", 32),
            found("eth0:1", "10.0.0.5", 24),
            found("eth0", "fe80::5", 64),
            found("eth0", "fd00::5", 64),
            found("eth0", "0.0.0.0", 0),
        ];
        let described = described(listed, &sysfs.path());
        let seen: Vec<_> = described
            .iter()
            .map(|one| (one.interface.as_str(), one.ip.to_string(), one.numa, one.speed_mbps, one.loopback))
            .collect();
        let expected = [
            ("lo", "127.0.0.1".to_owned(), None, None, true),
            ("lo", "10.255.0.1".to_owned(), None, None, false),
            ("eth0", "10.0.0.5".to_owned(), Some(0), Some(25_000), false),
            ("eth0", "fd00::5".to_owned(), Some(0), Some(25_000), false),
        ];
        assert_eq!(seen, expected);

        let many = (0..5_000u32).map(|host| InterfaceAddress {
            name: "eth0".to_owned(),
            ip: Ipv4Addr::from_bits(0x0a00_0000 + host).into(),
            prefix_len: 8,
        });
        assert_eq!(super::described(many.collect(), &sysfs.path()).len(), ADDRESSES_MAX);
    }

    #[test]
    fn multiple_numa_nodes_are_detected() {
        for (index, (online, several)) in
            [("0\n", false), ("0-1\n", true), ("0,2\n", true), ("0,2-3\n", true), ("7\n", false), ("", false)]
                .into_iter()
                .enumerate()
        {
            let sysfs = FakeSysfs::new(
                &format!("nodes-{index}"),
                &[("devices/system/node/online", online.as_bytes())],
            );
            assert_eq!(has_several_nodes(&sysfs.path()), several, "{online:?}");
        }
        assert!(!has_several_nodes(Path::new("/nowhere at all")));
    }

    #[test]
    fn netmask_converts_to_prefix_length() {
        for (ip, mask, expected) in [
            ("10.0.0.5", Some("255.255.255.0"), 24),
            ("10.0.0.5", Some("0.0.0.0"), 0),
            ("10.0.0.5", Some("255.0.255.0"), 8),
            ("10.0.0.5", None, 32),
            ("10.0.0.5", Some("ffff::"), 32),
            ("fd00::5", Some("ffff:ffff:ffff:ffff::"), 64),
            ("fd00::5", None, 128),
        ] {
            let len = prefix_len(ip.parse().unwrap(), mask.map(|mask| mask.parse().unwrap()));
            assert_eq!(len, expected, "{ip} {mask:?}");
        }
    }

    #[test]
    fn sockaddr_is_decoded_by_family() {
        // SAFETY: each pointer is null or to a local variable with the length of its family.
        unsafe {
            assert_eq!(ip_of(ptr::null()), None);
            let mut v4: libc::sockaddr_in = std::mem::zeroed();
            v4.sin_addr.s_addr = u32::from_be_bytes([10, 1, 2, 3]).to_be();
            assert_eq!(ip_of(ptr::from_ref(&v4).cast()), None);
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            assert_eq!(ip_of(ptr::from_ref(&v4).cast()), Some(Ipv4Addr::new(10, 1, 2, 3).into()));
            let mut v6: libc::sockaddr_in6 = std::mem::zeroed();
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_addr.s6_addr[15] = 1;
            assert_eq!(ip_of(ptr::from_ref(&v6).cast()), Some(Ipv6Addr::LOCALHOST.into()));
        }
    }

    /// The topology of the test machine is unknown; the test checks only that it can be queried.
    #[test]
    fn local_topology_can_be_queried() {
        for address in local_addresses().unwrap() {
            assert!(!address.interface.is_empty());
            assert!(u32::from(address.prefix_len) <= if address.ip.is_ipv4() { 32 } else { 128 });
        }
        let several = has_several_nodes(Path::new(SYSFS));
        assert!(several || current_numa_node().is_none());
        // A sandbox may forbid the call. No kernel supports more than 2^10 nodes.
        assert!(query_numa_node().is_none_or(|node| node < 1024));
    }
}
