//! Who may come in, and by which address: wrong passwords, virtual hosts, several addresses, few
//! permissions.

use serde_json::json;

use super::plumbing::answers;
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

async fn refused(url: String, words: &[&str]) {
    // `broker.give_up_after` is minutes, which no wait here is: a refusal is not tried for so long.
    let commands = [&["launch"][..], &["worker"], &["publish", "text"], &["stop"]];
    // All at once: services bear a refusal for 15 s.
    let plain = commands.map(|arguments| (arguments, Settings::echo(&url)));
    // With remote control its workers wait for the withdrawals that it cannot read.
    let controlled = (&["launch"][..], Settings::echo(&url).controlled());
    let runs: Vec<_> = plain
        .into_iter()
        .chain([controlled])
        .map(|(arguments, settings)| (arguments, Sconce::run(&settings, arguments)))
        .collect();
    for (arguments, mut sconce) in runs {
        assert_eq!(sconce.exit_code().await, 78, "{arguments:?}: {}", sconce.log());
        let log = sconce.log();
        for word in words {
            assert!(log.contains(word), "{arguments:?} does not say {word:?}: {log}");
        }
        assert!(!log.contains("s3cret"), "{arguments:?} shows the password: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_of_a_wrong_password_names_the_broker_and_not_the_password() {
    let rabbit = Rabbit::shared();
    let address = rabbit.address().to_string();
    refused(rabbit.url_for("guest:s3cret", "/"), &[&address, "guest", "403", "password"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_virtual_host_ends_with_an_error_that_names_it() {
    let rabbit = Rabbit::shared();
    rabbit
        .eval("ok = rabbit_auth_backend_internal:add_user(<<\"stranger\">>, <<\"s3cret\">>, <<\"test\">>).");
    let address = rabbit.address().to_string();
    refused(rabbit.url_for("guest:guest", "nowhere"), &[&address, "nowhere", "530"]).await;
    refused(rabbit.url_for("stranger:s3cret", "/"), &[&address, "stranger", "530"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_addresses_a_dead_one_is_passed_over() {
    let rabbit = Rabbit::shared();
    let dead = "amqp://guest:guest@127.0.0.1:1/%2f";
    let settings = Settings::echo(format!("{dead},{}", rabbit.url()));
    let sconce = Sconce::launched(&settings).await;
    answers(sconce, rabbit, &settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_only_read_and_write_works_where_nothing_is_declared() {
    let rabbit = Rabbit::shared();
    rabbit.add_user("modest", "pw", ["", ".*", ".*"]);
    let settings = Settings::echo(rabbit.url_for("modest:pw", "/")).set("broker.declare", false);
    let client = Client::connect(&rabbit.url()).await;
    for queue in [&settings.tasks, &settings.replies, &settings.dead] {
        client.declare(queue, &[]).await;
    }
    let sconce = Sconce::launched(&settings).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "a"}))).await;
    client.publish(&settings.tasks, Task::raw("no JSON")).await;
    assert_eq!(replies.next().await.status_code() + replies.next().await.status_code(), 600);
    assert_eq!(client.get(&settings.dead).await.header("reason"), "undecodable");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn declaring_without_permission_ends_with_an_error_that_says_what_to_do() {
    let rabbit = Rabbit::shared();
    rabbit.add_user("humble", "s3cret", ["", ".*", ".*"]);
    let mut sconce = Sconce::launch(&Settings::echo(rabbit.url_for("humble:s3cret", "/")));
    assert_eq!(sconce.exit_code().await, 78, "{}", sconce.log());
    assert!(sconce.log().contains("permission"), "{}", sconce.log());
    assert!(!sconce.log().contains("s3cret"));
}
