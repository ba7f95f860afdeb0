//! Which network interface of this host has an address.
//!
//! Libraries that take the name of an interface (NCCL) are told the one of the address that the user gave.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Assigned {
    name: String,
    address: IpAddr,
    mask: Option<IpAddr>,
    is_loopback: bool,
}

/// The name of the interface that has `address`; `None` when none has. Every address of the loopback's network is the
/// loopback's.
pub fn of_address(address: IpAddr) -> io::Result<Option<String>> {
    Ok(chosen(&assigned()?, address).map(|assigned| assigned.name.clone()))
}

/// The one of `all` that has `address`.
fn chosen(all: &[Assigned], address: IpAddr) -> Option<&Assigned> {
    let exact = all.iter().find(|assigned| assigned.address == address);
    exact.or_else(|| all.iter().find(|assigned| assigned.is_loopback && assigned.network_has(address)))
}

impl Assigned {
    fn network_has(&self, other: IpAddr) -> bool {
        match (self.address, self.mask, other) {
            (IpAddr::V4(own), Some(IpAddr::V4(mask)), IpAddr::V4(other)) => {
                own.to_bits() & mask.to_bits() == other.to_bits() & mask.to_bits()
            }
            (IpAddr::V6(own), Some(IpAddr::V6(mask)), IpAddr::V6(other)) => {
                own.to_bits() & mask.to_bits() == other.to_bits() & mask.to_bits()
            }
            _ => false,
        }
    }
}

/// Every address of every interface that is up.
fn assigned() -> io::Result<Vec<Assigned>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the out-pointer is valid.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut all, mut next) = (Vec::new(), list);
    // SAFETY: entries of the list are valid until it is freed below, and so is what they point to.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let flags = entry.ifa_flags as i32;
        // SAFETY: the entry's addresses are null or of their family.
        let Some(address) = (unsafe { ip_of(entry.ifa_addr) }) else { continue };
        if flags & libc::IFF_UP == 0 {
            continue;
        }
        all.push(Assigned {
            // SAFETY: a name is a C string.
            name: unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned(),
            address,
            // SAFETY: as the address.
            mask: unsafe { ip_of(entry.ifa_netmask) },
            is_loopback: flags & libc::IFF_LOOPBACK != 0,
        });
    }
    // SAFETY: it was given by getifaddrs, and nothing of it is used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(all)
}

/// The IP address at `address`, if it is one.
///
/// # Safety
/// `address` is null, or a socket address of the family that it names.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise.
    let family = unsafe { address.as_ref()? }.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: of that family.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: of that family.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from_octets(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned_to(name: &str, address: &str, mask: &str) -> Assigned {
        let [address, mask] = [address, mask].map(|text| text.parse().unwrap());
        Assigned { name: name.into(), address, mask: Some(mask), is_loopback: name == "lo" }
    }

    #[test]
    fn an_address_belongs_to_the_interface_that_has_it_and_not_to_its_network() {
        let all = [
            assigned_to("lo", "127.0.0.1", "255.0.0.0"),
            assigned_to("lo", "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            assigned_to("eth0", "10.0.0.1", "255.255.255.0"),
            assigned_to("ib0", "10.0.1.1", "255.255.255.0"),
            assigned_to("eth0", "fd00::7", "ffff:ffff:ffff:ffff::"),
        ];
        let name = |address: &str| chosen(&all, address.parse().unwrap()).map(|found| found.name.as_str());
        assert_eq!(["10.0.0.1", "10.0.1.1", "fd00::7"].map(name), [Some("eth0"), Some("ib0"), Some("eth0")]);
        assert_eq!(["127.0.0.1", "127.0.0.2", "::1"].map(name), [Some("lo"); 3]);
        assert_eq!(["10.0.0.2", "fd00::8", "::2", "128.0.0.1"].map(name), [None; 4]);
    }

    #[test]
    fn this_machine_has_its_loopback() {
        assert_eq!(of_address(Ipv4Addr::LOCALHOST.into()).unwrap().as_deref(), Some("lo"));
    }
}
