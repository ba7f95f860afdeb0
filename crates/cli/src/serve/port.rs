//! The HTTP port: taken is found out before anything loads, listening starts when all is ready.

use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

/// Connections that the kernel queues before they are accepted.
const BACKLOG: i32 = 1024;

/// A port that is bound but does not accept connections yet.
pub struct ReservedPort {
    socket: OwnedFd,
    /// The address with the port the kernel chose for port 0.
    pub address: SocketAddr,
}

impl ReservedPort {
    /// Binds `address`. Errors in one sentence when another process listens there.
    ///
    /// `SO_REUSEADDR` lets a restart bind a port whose old connections still linger; since two
    /// such sockets may coexist until one listens, a brief test listener finds a running server.
    pub fn new(address: SocketAddr) -> Result<Self> {
        let taken = |error: std::io::Error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => "stop that process or choose another --port",
                ErrorKind::AddrNotAvailable => "--host must be an address of this machine",
                ErrorKind::PermissionDenied => "choose a --port above 1023",
                _ => "choose another --host or --port",
            };
            CliError::new(ExitCode::Flags, format!("cannot listen on {address}: {error}; {hint}"))
        };
        drop(TcpListener::bind(address).map_err(taken)?);
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let bind = || -> rustix::io::Result<OwnedFd> {
            let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_reuseaddr(&socket, true)?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        };
        let socket = bind().map_err(|e| taken(e.into()))?;
        let bound = rustix::net::getsockname(&socket).map_err(|e| taken(e.into()))?;
        let address = SocketAddr::try_from(bound).map_err(|e| taken(e.into()))?;
        Ok(Self { socket, address })
    }

    /// Starts to accept connections; needs a tokio runtime.
    pub fn listen(self) -> Result<tokio::net::TcpListener> {
        let address = self.address;
        let failed =
            |e: std::io::Error| CliError::new(ExitCode::Flags, format!("cannot listen on {address}: {e}"));
        rustix::net::listen(&self.socket, BACKLOG).map_err(|e| failed(e.into()))?;
        let listener = TcpListener::from(self.socket);
        listener.set_nonblocking(true).map_err(failed)?;
        tokio::net::TcpListener::from_std(listener).map_err(failed)
    }
}
