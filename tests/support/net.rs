//! Machines for a test: network namespaces on virtual cables to a router in a namespace of its own,
//! and what can go wrong between them. Nothing outside these namespaces is touched.
//!
//! A router stands between, rather than one cable, so that packets can be lost in silence while both
//! ends see their own link up. Needs no more of the kernel than `veth` and routing rules; delay and
//! loss come from a small program on a TUN device, because few kernels here have `netem`.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Tells a process in which network it is.
pub const NET: &str = "KVX_TEST_NET";
/// The cable's end in every machine.
pub const DEVICE: &str = "kvx0";
/// The machine that the test's body runs on.
pub const READER: u8 = 0;
/// Machines for holders.
pub const HOLDER: u8 = 1;
pub const OTHER: u8 = 2;
const MACHINES: u8 = 3;
/// All machines' addresses are in it.
pub const NETWORK: &str = "10.213.0.0/16";
const WIRE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/wire.py");

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments.split(' '))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {arguments}: {}", why.trim()))
}

fn ip(arguments: &str) -> Result<(), String> {
    run("ip", arguments)
}

/// The machines of one test, by name.
#[derive(Debug, Clone)]
pub struct Net(String);

/// Removes the machines when dropped.
pub struct Built(pub Net);

impl Drop for Built {
    fn drop(&mut self) {
        for machine in 0..MACHINES {
            let _ = ip(&format!("netns delete {}", self.0.machine(machine)));
        }
        // With it go its ends of the cables, and so the other ends.
        let _ = ip(&format!("netns delete {}", self.0.router()));
    }
}

impl Net {
    /// Builds a network that no other process has.
    pub fn build(test: &str) -> Result<Built, String> {
        let number = test.bytes().fold(0_u16, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(byte.into())
        });
        let built = Built(Self(format!("kvx-{}-{number:x}", std::process::id())));
        let net = &built.0;
        let router = net.router();
        ip(&format!("netns add {router}"))?;
        for (setting, value) in [("ip_forward", "1"), ("conf/all/rp_filter", "0")] {
            let file = format!("/proc/sys/net/ipv4/{setting}");
            let write = format!("echo {value} > {file}");
            let status = Command::new("ip")
                .args(["netns", "exec", &router, "sh", "-c", &write])
                .status();
            if !status.is_ok_and(|status| status.success()) {
                return Err(format!("{file} cannot be set"));
            }
        }
        for machine in 0..MACHINES {
            let name = net.machine(machine);
            ip(&format!("netns add {name}"))?;
            ip(&format!(
                "link add {DEVICE} netns {name} type veth peer name to{machine} netns {router}"
            ))?;
            let (address, gateway) = (Self::address(machine), Self::gateway(machine));
            ip(&format!("-n {name} addr add {address}/24 dev {DEVICE}"))?;
            ip(&format!(
                "-n {router} addr add {gateway}/24 dev to{machine}"
            ))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set {DEVICE} up"))?;
            ip(&format!("-n {router} link set to{machine} up"))?;
            ip(&format!("-n {name} route add default via {gateway}"))?;
        }
        ip(&format!("-n {router} link set lo up"))?;
        // The kernel takes up to a second to see that both ends are plugged in.
        let until = Instant::now() + Duration::from_secs(20);
        for machine in 1..MACHINES {
            while net.ping(machine).is_err() {
                if Instant::now() > until {
                    return Err("the machines do not reach each other".into());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(built)
    }

    /// The network of this process, if it is in one.
    pub fn current() -> Option<Self> {
        std::env::var(NET).ok().map(Self)
    }

    pub fn name(&self) -> &str {
        &self.0
    }

    fn router(&self) -> String {
        format!("{}-r", self.0)
    }

    fn machine(&self, machine: u8) -> String {
        format!("{}-{machine}", self.0)
    }

    pub fn address(machine: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, machine, 2)
    }

    fn gateway(machine: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, machine, 1)
    }

    /// Whether a machine answers the reader's: a refused connection is an answer.
    fn ping(&self, machine: u8) -> Result<(), String> {
        let address = Self::address(machine);
        // The shell's own redirection: needs no `ping`.
        let script = format!(
            "import socket; s = socket.socket(); s.settimeout(1)\n\
             raise SystemExit(s.connect_ex(('{address}', 9)) not in (0, 111))"
        );
        let status = self
            .command(READER, Path::new("python3"))
            .args(["-c", &script])
            .status();
        match status {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("{address}: {other:?}")),
        }
    }

    /// A program on one of the machines. `ip netns exec` becomes the program, so that killing the
    /// child ends the program.
    pub fn command(&self, machine: u8, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.machine(machine)])
            .arg(program)
            .env(NET, &self.0)
            .env("UCX_NET_DEVICES", DEVICE);
        command
    }

    fn rules(&self, change: &str, machine: u8, what: &str) {
        let (router, address) = (self.router(), Self::address(machine));
        ip(&format!(
            "-n {router} rule {change} pref 10 iif to{machine} {what}"
        ))
        .unwrap();
        ip(&format!(
            "-n {router} rule {change} pref 11 to {address} {what}"
        ))
        .unwrap();
    }

    /// Does something to a machine's connection with the others.
    pub fn strike(&self, outage: Outage, machine: u8) {
        match outage {
            Outage::Unplugged => {
                ip(&format!("-n {} link set to{machine} down", self.router())).unwrap();
            }
            Outage::DownAtHolder => {
                ip(&format!(
                    "-n {} link set {DEVICE} down",
                    self.machine(machine)
                ))
                .unwrap();
            }
            Outage::Dropped => self.rules("add", machine, "blackhole"),
            Outage::Unreachable => self.rules("add", machine, "unreachable"),
        }
    }

    /// Undoes it.
    pub fn repair(&self, outage: Outage, machine: u8) {
        match outage {
            Outage::Unplugged => {
                ip(&format!("-n {} link set to{machine} up", self.router())).unwrap();
            }
            Outage::DownAtHolder => {
                let name = self.machine(machine);
                ip(&format!("-n {name} link set {DEVICE} up")).unwrap();
                let gateway = Self::gateway(machine);
                // Went with the link.
                ip(&format!("-n {name} route replace default via {gateway}")).unwrap();
            }
            Outage::Dropped => self.rules("del", machine, "blackhole"),
            Outage::Unreachable => self.rules("del", machine, "unreachable"),
        }
    }

    /// Bounds what a machine sends, in the words of `tc`: `100mbit`.
    pub fn limit(&self, machine: u8, rate: &str) -> Result<(), String> {
        let name = self.machine(machine);
        let shape = format!("root tbf rate {rate} burst 64kb latency 200ms");
        run(
            "tc",
            &format!("-n {name} qdisc replace dev {DEVICE} {shape}"),
        )
    }

    pub fn unlimit(&self, machine: u8) {
        let name = self.machine(machine);
        run("tc", &format!("-n {name} qdisc del dev {DEVICE} root")).unwrap();
    }

    /// Leads all packets between the machines over a wire that is slow to deliver them and loses
    /// some. Ends when dropped.
    pub fn wire(&self, delay: Duration, loss_per_thousand: u32) -> Result<Wire, String> {
        let router = self.router();
        let mut child = Command::new("ip")
            .args(["netns", "exec", &router, "python3", WIRE])
            .args([delay.as_micros().to_string(), loss_per_thousand.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            let _ = BufReader::new(output).read_line(&mut line);
        }
        let wire = Wire(child);
        if line.trim() != "ready" {
            return Err("no TUN device can be made".into());
        }
        ip(&format!("-n {router} link set wire0 up"))?;
        ip(&format!(
            "-n {router} route replace default dev wire0 table 100"
        ))?;
        for machine in 0..MACHINES {
            // What comes off the wire is delivered by the main table.
            let rule = format!("rule add pref {} iif to{machine} lookup 100", 20 + machine);
            ip(&format!("-n {router} {rule}"))?;
        }
        Ok(wire)
    }

    /// Takes the packets off the wire.
    pub fn unwire(&self, wire: Wire) {
        for machine in 0..MACHINES {
            let rule = format!("rule del pref {}", 20 + machine);
            ip(&format!("-n {} {rule}", self.router())).unwrap();
        }
        drop(wire);
    }
}

/// How a connection can fail with both ends alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// The machine's cable is pulled: it sees its carrier go.
    Unplugged,
    /// Its own link is set down.
    DownAtHolder,
    /// Packets are lost both ways, without a word; every link stays up.
    Dropped,
    /// The router answers that the machine cannot be reached.
    Unreachable,
}

/// A process that carries packets.
pub struct Wire(Child);

impl Drop for Wire {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
