//! The processes of one group: a holder and a reader for every participant, of which only one pair
//! runs at a time.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use super::cases::Case;
use super::contender::{Contender, Group};
use super::control::Control;
use super::error::BenchError;
use super::fabric::UcxLog;
use super::link::{Link, Ran};
use super::proto::{Request, Role};
use super::row::{Absent, Who};
use crate::proc::Interrupt;

/// Time to reach a target.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// What all groups of a bench have in common.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// This tool's program, which plays its own participants.
    pub kvx: PathBuf,
    /// Ctrl-C.
    pub interrupt: Interrupt,
    /// A target on another node, `host:port`, in place of holders here.
    pub peer: Option<String>,
    /// Seed of patterns and block lists.
    pub seed: u64,
}

/// A participant that takes part.
#[derive(Debug)]
pub struct Pair {
    /// Who.
    pub contender: Contender,
    /// What the reader runs on, as it says.
    pub about: Map<String, Value>,
    holder: usize,
    reader: Link,
    log: UcxLog,
}

/// A run, with the processor time of both ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// What the reader says.
    pub ran: Ran,
    /// Processor time of holder and reader together, microseconds.
    pub cpu_us: u64,
}

/// All participants of a group, ready to read.
#[derive(Debug)]
pub struct Team {
    holders: Vec<Link>,
    pairs: Vec<Pair>,
    freezes: bool,
    absent: Vec<Absent>,
    fabric: Option<String>,
    /// What holders have answered to cases.
    told: HashMap<(Option<usize>, String), Option<Value>>,
}

impl Team {
    /// Starts every participant's processes and has them make their memory. Those that cannot take
    /// part are [absent](Self::take_absent).
    ///
    /// # Errors
    /// [`BenchError`] at Ctrl-C, or when the target cannot be reached.
    pub fn gather(group: &Group, around: &Surroundings) -> Result<Self, BenchError> {
        let mut team = Self {
            holders: Vec::new(),
            pairs: Vec::new(),
            freezes: false,
            absent: Vec::new(),
            fabric: None,
            told: HashMap::new(),
        };
        let cards = match &around.peer {
            Some(peer) => team.remote_holder(group, peer, around)?,
            None => team.local_holders(group, around)?,
        };
        team.readers(group, around, cards)?;
        team.freezes = team.pairs.len() > 1;
        team.freeze_all()?;
        Ok(team)
    }

    fn miss(&mut self, contender: &Contender, error: BenchError) -> Result<(), BenchError> {
        if error.is_interrupt() {
            return Err(error);
        }
        self.absent.push(Absent {
            who: contender.who,
            setting: contender.setting.clone(),
            why: error.to_string(),
        });
        Ok(())
    }

    /// One holder on another node, for all.
    fn remote_holder(
        &mut self,
        group: &Group,
        peer: &str,
        around: &Surroundings,
    ) -> Result<Vec<Seat>, BenchError> {
        let control = Control::connect(peer, CONNECT_LIMIT, &around.interrupt)?;
        let mut link = Link::target(control);
        let everyone = Contender::new(Who::KvXfer, "");
        let mut settings = everyone.settings(group.carrier, &group.settings);
        settings.insert("ceiling".to_owned(), true.into());
        link.send(&Request::Setup {
            role: Role::Holder,
            shape: group.shape,
            seed: around.seed,
            settings,
            card: None,
        })?;
        let (card, about) = link.ready()?;
        let fabric = about.get("fabric").and_then(Value::as_str);
        self.fabric = fabric.map(str::to_owned);
        self.holders.push(link);
        let seat = |contender: &Contender| Seat {
            contender: contender.clone(),
            holder: 0,
            card: card.clone(),
        };
        Ok(group.contenders.iter().map(seat).collect())
    }

    /// A holder here for each.
    fn local_holders(
        &mut self,
        group: &Group,
        around: &Surroundings,
    ) -> Result<Vec<Seat>, BenchError> {
        let mut started = Vec::new();
        for contender in &group.contenders {
            let begun = begin(contender, Role::Holder, None, group, around, &[]);
            match begun {
                Ok(link) => started.push((contender, link)),
                Err(error) => self.miss(contender, error)?,
            }
        }
        let mut seats = Vec::new();
        for (contender, mut link) in started {
            match link.ready() {
                Ok((card, about)) => {
                    tracing::info!(participant = contender.name(), ?about, "holder");
                    seats.push(Seat {
                        contender: contender.clone(),
                        holder: self.holders.len(),
                        card,
                    });
                    self.holders.push(link);
                }
                Err(error) => self.miss(contender, error)?,
            }
        }
        Ok(seats)
    }

    fn readers(
        &mut self,
        group: &Group,
        around: &Surroundings,
        seats: Vec<Seat>,
    ) -> Result<(), BenchError> {
        let mut started = Vec::new();
        for seat in seats {
            let log = UcxLog::new();
            let variables = log.variables();
            let card = seat.card.clone();
            let begun = begin(
                &seat.contender,
                Role::Reader,
                card,
                group,
                around,
                &variables,
            );
            match begun {
                Ok(link) => started.push((seat, link, log)),
                Err(error) => self.miss(&seat.contender, error)?,
            }
        }
        for (seat, mut link, log) in started {
            match link.ready() {
                Ok((_, about)) => {
                    tracing::info!(participant = seat.contender.name(), ?about, "reader");
                    self.pairs.push(Pair {
                        contender: seat.contender,
                        about,
                        holder: seat.holder,
                        reader: link,
                        log,
                    });
                }
                Err(error) => self.miss(&seat.contender, error)?,
            }
        }
        Ok(())
    }

    fn freeze_all(&mut self) -> Result<(), BenchError> {
        if !self.freezes {
            return Ok(());
        }
        for pair in &mut self.pairs {
            pair.reader.freeze()?;
        }
        for holder in &mut self.holders {
            holder.freeze()?;
        }
        Ok(())
    }

    /// Those that take part.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// What the target has to carry bytes with, as it says.
    #[must_use]
    pub fn fabric(&self) -> Option<&str> {
        self.fabric.as_deref()
    }

    /// Those that do not, any more; each once.
    pub fn take_absent(&mut self) -> Vec<Absent> {
        std::mem::take(&mut self.absent)
    }

    /// Leaves one out from now on.
    ///
    /// # Errors
    /// The error itself at Ctrl-C.
    pub fn dismiss(&mut self, index: usize, error: BenchError) -> Result<(), BenchError> {
        if index < self.pairs.len() {
            let pair = self.pairs.remove(index);
            let shared = self.pairs.iter().any(|other| other.holder == pair.holder);
            if let (false, Some(holder)) = (shared, self.holders.get_mut(pair.holder)) {
                // It may be the one that is gone.
                let _ = holder.freeze();
            }
            self.miss(&pair.contender, error)?;
        }
        Ok(())
    }

    /// Does something with one pair, all others standing still.
    fn awake<T>(
        &mut self,
        index: usize,
        act: impl FnOnce(&mut Link, &mut Link) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let nobody = || BenchError::OutOfTurn("team".to_owned());
        let pair = self.pairs.get_mut(index).ok_or_else(nobody)?;
        let holder = self.holders.get_mut(pair.holder).ok_or_else(nobody)?;
        holder.thaw()?;
        pair.reader.thaw()?;
        let done = act(holder, &mut pair.reader)?;
        if self.freezes {
            pair.reader.freeze()?;
            holder.freeze()?;
        }
        Ok(done)
    }

    /// Tells one pair a case.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn tell(&mut self, index: usize, case: &Case) -> Result<(), BenchError> {
        // A holder that several have in common is told once: a second time would end the lease of
        // the first.
        let holder = self.pairs.get(index).map(|pair| pair.holder);
        let mut told = std::mem::take(&mut self.told);
        let done = self.awake(index, |link, reader| {
            for (name, lists) in case.read_names().into_iter().zip(&case.reads) {
                let key = (holder, name.clone());
                let ticket = match told.get(&key) {
                    Some(ticket) => ticket.clone(),
                    None => link.case(name.clone(), lists.clone(), None)?,
                };
                told.insert(key, ticket.clone());
                reader.case(name, lists.clone(), ticket)?;
            }
            Ok(())
        });
        self.told = told;
        done
    }

    /// Has one pair do a case, all its reads together.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn measure(
        &mut self,
        index: usize,
        case: &Case,
        times: u32,
        verify: u32,
    ) -> Result<Measured, BenchError> {
        let names = case.read_names();
        self.awake(index, |holder, reader| {
            let before = holder.cpu_us()?.saturating_add(reader.cpu_us()?);
            let ran = reader.run(&names, times, verify)?;
            let after = reader.cpu_us()?.saturating_add(holder.cpu_us()?);
            Ok(Measured {
                ran,
                cpu_us: after.saturating_sub(before),
            })
        })
    }

    /// Ends all processes; what carried the bytes of each, as far as that is known.
    #[must_use]
    pub fn part(self) -> Vec<(Contender, String)> {
        let mut carriers = Vec::new();
        for pair in self.pairs {
            // UCX writes what it has to say when its process ends.
            pair.reader.quit();
            let said = pair.about.get("transport").and_then(Value::as_str);
            let logged = match pair.contender.uses_ucx() {
                true => pair.log.carrier(),
                false => None,
            };
            let carrier = logged.unwrap_or_else(|| said.unwrap_or("unknown").to_owned());
            carriers.push((pair.contender, carrier));
        }
        for holder in self.holders {
            holder.quit();
        }
        carriers
    }
}

/// A participant whose holder is ready.
struct Seat {
    contender: Contender,
    holder: usize,
    card: Option<Value>,
}

/// Starts a process and sends it its setup.
fn begin(
    contender: &Contender,
    role: Role,
    card: Option<Value>,
    group: &Group,
    around: &Surroundings,
    variables: &[(String, String)],
) -> Result<Link, BenchError> {
    let mut command = contender.command(&around.kvx, group.carrier)?;
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let what = match role {
        Role::Holder => "holder",
        Role::Reader => "reader",
    };
    let name = format!("{} {what}", contender.name());
    let mut link = Link::child(name, command, &around.interrupt)?;
    link.send(&Request::Setup {
        role,
        shape: group.shape,
        seed: around.seed,
        settings: contender.settings(group.carrier, &group.settings),
        card,
    })?;
    Ok(link)
}
