//! Keeps an agent over TCP from making connections once it has the one that it needs.
//!
//! libfabric's `tcp` provider connects anew whenever a connection has broken, and NIXL's LIBFABRIC plugin waits for that
//! within the call that posts, without a limit: a read from a peer that has died would keep the thread busy for ever, and
//! its blocks in doubt. A reader never wants a second connection: whoever comes back is met afresh, by another agent. So
//! the agent's thread has the kernel refuse its `connect` from then on, and such a read fails at once.
//!
//! The filter is this one thread's, which makes no other connections. Where the kernel takes no filters, reads from dead
//! peers hang as described in `transport::aside`.

/// The kernel's offset of the system call's number in what a filter sees.
const NUMBER: u32 = 0;

/// Has every later `connect` of this thread fail with "connection refused".
pub(super) fn no_more_connections() {
    let load_number = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, NUMBER, 0, 0);
    let connect = u32::try_from(libc::SYS_connect).unwrap_or(u32::MAX);
    let is_connect = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, connect, 0, 1);
    let errno = u32::try_from(libc::ECONNREFUSED).unwrap_or(1);
    let refuse = statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ERRNO | errno,
        0,
        0,
    );
    let allow = statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0);
    let mut filter = [load_number, is_connect, refuse, allow];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain numbers; it affects this thread, which starts no programs.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    // SAFETY: `program` points to four statements, which the kernel checks and copies within the call. They let
    // every call through but one, which then fails like a connection that nobody takes.
    let filtered = promised
        && unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                0,
                &raw const program,
            )
        } == 0;
    if !filtered {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "reads from a peer that has died may hang on this agent's thread");
    }
}

fn statement(code: u32, k: u32, if_true: u8, if_false: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: u16::try_from(code).unwrap_or(0),
        jt: if_true,
        jf: if_false,
        k,
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_thread_that_stays_connected_connects_no_more_and_others_do() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let refused = std::thread::spawn(move || {
            TcpStream::connect(address).unwrap();
            no_more_connections();
            std::fs::read("/proc/self/stat").unwrap();
            TcpStream::connect(address).map_err(|error| error.kind())
        });
        let refused = refused.join().unwrap();
        TcpStream::connect(address).unwrap();
        match refused {
            Err(kind) => assert_eq!(kind, ErrorKind::ConnectionRefused),
            Ok(_) => {
                use std::io::Write;
                let _ = writeln!(std::io::stderr(), "skipped: no seccomp filters here");
            }
        }
    }
}
