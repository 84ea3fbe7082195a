//! Three RabbitMQ nodes that are one cluster.

use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use super::rabbit::{Conf, Rabbit};
use super::wait::until_within;

/// A quorum queue on three nodes survives the death of one.
const NODES: usize = 3;
/// A node that comes back copies what it missed.
const REJOIN: Duration = Duration::from_secs(90);

/// The nodes of one cluster; they end with it.
pub struct Cluster {
    pub nodes: Vec<Rabbit>,
}

impl Cluster {
    /// Starts the nodes, and joins them.
    pub fn start() -> Self {
        let nodes: Vec<_> = (0..NODES).map(|_| Rabbit::stopped(Conf::default().cookie("sconce"))).collect();
        thread::scope(|scope| nodes.iter().for_each(|node| drop(scope.spawn(|| node.start()))));
        for node in &nodes[1..] {
            node.join(&nodes[0]);
        }
        Self { nodes }
    }

    /// Every node's address, beginning with the one of that number.
    pub fn url_from(&self, first: usize) -> String {
        let mut urls = String::new();
        for number in 0..NODES {
            let comma = if number > 0 { "," } else { "" };
            let _ = write!(urls, "{comma}{}", self.nodes[(first + number) % NODES].url());
        }
        urls
    }

    /// The number of the node that leads a quorum queue, as another node sees it.
    pub fn leader_of(&self, queue: &str, seen_by: usize) -> usize {
        let leader = self.nodes[seen_by].queue_info(queue, "leader").expect("the queue");
        let is_leader = |node: &Rabbit| leader.contains(node.name());
        self.nodes.iter().position(is_leader).unwrap_or_else(|| panic!("no node is {leader:?}"))
    }

    /// Starts a killed node again, and waits until its members of the queues are back too.
    pub async fn bring_back(&self, node: usize, queues: &[&str]) {
        tokio::task::block_in_place(|| self.nodes[node].start());
        self.all_members_are_online(node, queues).await;
    }

    /// Waits until each queue has a member on every node, as one of them sees it: with fewer, the
    /// death of a node may leave no majority.
    pub async fn all_members_are_online(&self, seen_by: usize, queues: &[&str]) {
        let online = || {
            let is_whole = |queue: &&str| {
                let online = self.nodes[seen_by].queue_info(queue, "online").unwrap_or_default();
                self.nodes.iter().all(|node| online.contains(node.name()))
            };
            queues.iter().all(is_whole)
        };
        until_within(REJOIN, "every member of the queues is online", || {
            let all = tokio::task::block_in_place(online);
            async move { all.then_some(()) }
        })
        .await;
    }
}
