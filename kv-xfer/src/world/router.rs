//! The router: it keeps descriptors by conversation and hands them out, not always the right one.

use super::World;
use super::content::{CONVERSATIONS, HISTORIES};
use super::record::Descriptor;
use crate::descriptor::{DescriptorLimits, SealedTicket};

/// Descriptors that it keeps.
const KEPT: usize = 24;

/// What is wrong with a descriptor that was handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    Nothing,
    /// It is of another conversation, or another tenant's.
    Place,
    /// It was damaged on the way.
    Damaged,
}

/// A descriptor as an engine gets it.
pub(super) struct HandedOut {
    pub descriptor: Descriptor,
    pub wrong: Wrong,
    pub tenant: &'static str,
    /// The conversation that the engine believes to serve, and its history of it.
    pub conversation: usize,
    pub history: usize,
}

impl World {
    pub(super) fn keep_descriptor(&mut self, descriptor: Descriptor) {
        if self.descriptors.len() >= KEPT {
            self.descriptors.remove(0);
        }
        self.descriptors.push(descriptor);
    }

    /// Hands a descriptor out.
    pub(super) fn hand_out(&mut self) -> Option<HandedOut> {
        let troubles = self.troubles;
        let count = self.descriptors.len();
        // The newest ones, but for a router that is behind.
        let at = if self.dice.chance(troubles.stale) {
            self.dice.below(count)
        } else {
            count
                .saturating_sub(1)
                .saturating_sub(self.dice.below(count.min(3)))
        };
        let mut descriptor = self.descriptors.get(at)?.clone();
        let (mut conversation, mut history) = (descriptor.conversation, descriptor.history);
        if self.dice.chance(200) {
            history = self.dice.below(HISTORIES);
        }
        let (mut wrong, mut tenant) = (Wrong::Nothing, "tenant");
        if self.dice.chance(troubles.mixed_up) {
            wrong = Wrong::Place;
            if self.dice.chance(300) {
                tenant = "another";
            } else {
                let other = self.dice.within(1, CONVERSATIONS - 1);
                conversation = (conversation + other) % CONVERSATIONS;
            }
        } else if self.dice.chance(troubles.damage) && self.damage(&mut descriptor) {
            wrong = Wrong::Damaged;
        }
        Some(HandedOut {
            descriptor,
            wrong,
            tenant,
            conversation,
            history,
        })
    }

    /// Damages a descriptor. False when it stayed as it was, or cannot be parsed any more.
    fn damage(&mut self, descriptor: &mut Descriptor) -> bool {
        let others: Vec<_> = self
            .places
            .iter()
            .filter(|place| place.name != descriptor.remote.remote_engine_id)
            .map(|place| place.name.clone())
            .collect();
        let remote = &mut descriptor.remote;
        if self.dice.chance(250) {
            let other = self.dice.pick(&others).cloned();
            return other.is_some_and(|other| {
                remote.remote_engine_id = other;
                true
            });
        }
        let Some(ticket) = &remote.ticket else {
            return false;
        };
        let mut text = ticket.to_text().into_bytes();
        let at = self.dice.below(text.len());
        let with = *b"AZaz09-_".get(self.dice.below(8)).unwrap_or(&b'A');
        if let Some(byte) = text.get_mut(at) {
            *byte = with;
        }
        let parsed = String::from_utf8(text).ok();
        let parsed =
            parsed.and_then(|text| SealedTicket::parse(&text, &DescriptorLimits::default()).ok());
        match parsed {
            Some(parsed) if parsed != *ticket => {
                remote.ticket = Some(parsed);
                true
            }
            _ => false,
        }
    }
}
