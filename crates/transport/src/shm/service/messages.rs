//! What the service does with each message.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use layercake_protocol::ids::EngineId;
use mio::Token;

use super::super::attachment::Attachment;
use super::super::greeting::{InitiatorStep, OwnerStep};
use super::super::initiator::NotAttached;
use super::super::owner::{Opened, PeerKey};
use super::super::socket::Received;
use super::super::wire::{Message, NotOpenedReason, RefusedReason};
use super::{Role, Service, refuse};

/// What becomes of a connection after a message.
pub(super) enum Next {
    Keep,
    Close,
    /// It broke the protocol.
    Broken(String),
}

impl Service {
    pub(super) fn on_received(&mut self, token: Token, received: Received) -> Next {
        let message = match Message::decode(&received.bytes) {
            Ok(message) => message,
            Err(error) => return Next::Broken(error.to_string()),
        };
        if received.descriptors.len() != message.descriptors() {
            let count = received.descriptors.len();
            return Next::Broken(format!("{count} descriptors came with a message"));
        }
        let Some(connection) = self.connections.get_mut(&token) else {
            return Next::Keep;
        };
        match &mut connection.role {
            Role::Greeted { greeting, .. } => {
                let step = greeting.on_message(&message);
                self.greet_as_owner(token, step)
            }
            Role::Serving(key) => {
                let key = *key;
                self.serve(token, key, &message)
            }
            Role::Greeting {
                owner, greeting, ..
            } => {
                let (owner, step) = (*owner, greeting.on_message(&message));
                self.greet_as_initiator(token, owner, step, received.descriptors)
            }
            // Not read any more.
            Role::Leaving(_) => Next::Keep,
            Role::Attached(attachment) => {
                let attachment = Arc::clone(attachment);
                self.on_answer(&attachment, &message, received.descriptors)
            }
        }
    }

    fn greet_as_owner(&mut self, token: Token, step: OwnerStep) -> Next {
        match step {
            OwnerStep::Send(message) => {
                self.send(token, &message, Vec::new());
                Next::Keep
            }
            OwnerStep::Refuse(reason) => {
                if reason == RefusedReason::NotTrusted {
                    self.shared.context.stats.add_untrusted();
                }
                if let Some(connection) = self.connections.get(&token) {
                    refuse(&connection.channel, reason);
                }
                Next::Close
            }
            OwnerStep::Broken => Next::Broken("a message out of turn".to_owned()),
            OwnerStep::Attach(engine) => self.attach(token, engine),
        }
    }

    fn attach(&mut self, token: Token, engine: EngineId) -> Next {
        let Some(connection) = self.connections.get_mut(&token) else {
            return Next::Keep;
        };
        let exports = &self.shared.exports;
        let attached = exports.table_file().try_clone_to_owned().and_then(|table| {
            let attached = exports.attach(engine, Arc::clone(&connection.channel))?;
            Ok(attached.map(|(key, slots)| (key, slots, table)))
        });
        match attached {
            Ok(Some((key, slots, table))) => {
                connection.role = Role::Serving(key);
                let message = Message::Attached {
                    probe_addr: std::ptr::from_ref(&*self.shared.probe) as u64,
                    probe: *self.shared.probe,
                };
                self.send(token, &message, vec![table, slots]);
                Next::Keep
            }
            none => {
                let error = none.err();
                tracing::warn!(?error, "no room for another peer on this host");
                refuse(&connection.channel, RefusedReason::Busy);
                Next::Close
            }
        }
    }

    fn serve(&mut self, token: Token, key: PeerKey, message: &Message) -> Next {
        let stats = &self.shared.context.stats;
        match message {
            Message::Open { region, capability } => {
                let registry = &self.shared.context.registry;
                let opened = self.shared.exports.open(registry, key, *region, capability);
                let opened = opened.unwrap_or_else(|reason| Opened {
                    message: Message::NotOpened {
                        region: *region,
                        capability: *capability,
                        reason,
                    },
                    descriptors: Vec::new(),
                });
                self.send(token, &opened.message, opened.descriptors);
                Next::Keep
            }
            Message::Violations { pieces } => {
                stats.add_security_refusals(u64::from(*pieces));
                Next::Keep
            }
            _ => Next::Broken("a message that only an owner sends".to_owned()),
        }
    }

    fn greet_as_initiator(
        &mut self,
        token: Token,
        owner: EngineId,
        step: InitiatorStep,
        descriptors: Vec<OwnedFd>,
    ) -> Next {
        let failed = match step {
            InitiatorStep::Send(message) => {
                self.send(token, &message, Vec::new());
                return Next::Keep;
            }
            InitiatorStep::Attached { probe_addr, probe } => {
                let Some(connection) = self.connections.get_mut(&token) else {
                    return Next::Keep;
                };
                let channel = Arc::clone(&connection.channel);
                let files = <[OwnedFd; 2]>::try_from(descriptors);
                let [table, slots] = files.expect("their number was checked against the message");
                let probe = (probe_addr, probe);
                match Attachment::new(owner, channel, table, slots, probe).map(Arc::new) {
                    Ok(attachment) => {
                        connection.role = Role::Attached(Arc::clone(&attachment));
                        return if self.shared.initiator.attached(&attachment) {
                            Next::Keep
                        } else {
                            Next::Close
                        };
                    }
                    Err(error) => {
                        tracing::warn!(%owner, %error, "can't use what a peer on this host shares");
                        NotAttached::FallBack
                    }
                }
            }
            InitiatorStep::Fail(error) => NotAttached::Fail(error),
            InitiatorStep::FallBack => NotAttached::FallBack,
        };
        // Closing finds nothing left that waits for it.
        self.shared.initiator.not_attached(owner, failed);
        self.drop_connection(token);
        Next::Keep
    }

    fn on_answer(
        &self,
        attachment: &Arc<Attachment>,
        message: &Message,
        descriptors: Vec<OwnedFd>,
    ) -> Next {
        let initiator = &self.shared.initiator;
        match *message {
            Message::Opened {
                region,
                capability,
                index,
                mapped,
                tags,
            } => {
                let mut files = descriptors.into_iter();
                let memory = mapped.then(|| files.next()).flatten();
                let tags = tags.then(|| files.next()).flatten();
                let key = (region, capability);
                if let Err(error) = initiator.opened(attachment, key, index, (memory, tags)) {
                    tracing::warn!(owner = %attachment.owner, %region, %error, "can't map a region");
                    initiator.not_opened(attachment, key, NotOpenedReason::NotShared);
                }
                Next::Keep
            }
            Message::NotOpened {
                region,
                capability,
                reason,
            } => {
                initiator.not_opened(attachment, (region, capability), reason);
                Next::Keep
            }
            Message::Withdrawn { region } => {
                attachment.forget(region);
                Next::Keep
            }
            _ => Next::Broken("a message that only an initiator sends".to_owned()),
        }
    }
}
